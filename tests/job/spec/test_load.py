"""Loading a JobSpec from a job file and options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchinfer.config import EngineConfig, PromptConfig, SamplingParams
from batchinfer.errors import UsageError
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import JobSpec, resolved
from tests.job.job_files import EVERY_KEY, MINIMAL, write_job

MOST_LINES = 12


def load(folder: Path, text: str = MINIMAL, **options: Any) -> JobSpec:
    return load_job(write_job(folder, text), **options)


def complaint(folder: Path, text: str = MINIMAL, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(folder, text, **options)
    message = str(caught.value)
    assert len(message.splitlines()) <= MOST_LINES
    return message.replace(f"{folder}/", "")


def test_a_minimal_job_has_the_documented_defaults(tmp_path: Path) -> None:
    spec = load(tmp_path)
    assert spec.name == "job"
    assert spec.model.name == "some/model"
    assert spec.sampling.params == SamplingParams(max_tokens=8, seed=0)
    assert spec.engine == EngineConfig()
    assert spec.prompt == PromptConfig()


def test_every_documented_key_is_known_and_at_its_default(tmp_path: Path) -> None:
    spec = load(tmp_path, EVERY_KEY, variables={"ds": "2026-11-20"})
    assert spec.name == "summarize-2026-11-20"
    assert spec.input.paths == (str(tmp_path / "lake/prompts/dt=2026-11-20"),)
    assert spec.output.path == str(tmp_path / "out/summaries/dt=2026-11-20")
    short = "model: Qwen/Qwen3-0.6B\ninput: {path: x}\nsampling: {max_tokens: 256}\n"
    defaults = load(tmp_path, short + "output: {path: y}\n")
    for section in ("model", "prompt", "sampling", "engine", "errors", "stats"):
        assert getattr(spec, section) == getattr(defaults, section), section
    paths = {"path"}
    assert spec.input.model_dump(exclude=paths) == defaults.input.model_dump(exclude=paths)
    assert spec.output.model_dump(exclude=paths) == defaults.output.model_dump(exclude=paths)


def test_job_file_values_are_read(tmp_path: Path) -> None:
    text = """\
model: {name: m/x, dtype: float32, max_model_len: 99}
input: {path: [b.parquet, a.parquet], keep_columns: [id, text], id_column: id, limit: 5}
prompt: {template: "{{ text }}", system: Be brief.}
sampling:
  max_tokens: 8
  temperature: 0
  top_p: 1e-5
  stop: END
  bad_words: [no, yes]
  logit_bias: {50256: -100}
engine: {kv_cache_memory: 2}
output: {path: out, include: [token_ids], rename: {text: input_text}}
errors: {max_error_rate: 0.5}
"""
    spec = load(tmp_path, text)
    assert spec.input.paths == (str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet"))
    assert spec.input.keep_columns == ("id", "text")
    assert spec.sampling.temperature == 0.0
    assert spec.sampling.top_p == 1e-5
    assert spec.sampling.stop == ("END",)
    assert spec.sampling.bad_words == ("no", "yes")
    assert spec.sampling.logit_bias == {50256: -100.0}
    assert spec.output.rename == {"text": "input_text"}
    assert spec.prompt.template == "{{ text }}"


def test_job_name_from_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = Path(f"{tmp_path}/job\udcff.yaml")
    path.write_text(MINIMAL)
    assert load_job(path).name == "job\N{REPLACEMENT CHARACTER}"


def test_resolved_is_json_data_that_makes_the_same_job(tmp_path: Path) -> None:
    spec = load(tmp_path, MINIMAL, overrides=["sampling.logit_bias={5: 1}"])
    assert JobSpec.model_validate(resolved(spec)) == spec


# Mistakes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("engine: {preemption: swap, swap_space: 0}", "set swap_space, or preemption: auto"),
        ("engine: {preset: 3}", "engine.preset must be the name of a shipped preset, or a file"),
        (
            "prompt: {messages: [{role: user}]}",
            "prompt.messages: each message must have a role and a content",
        ),
        ("prompt: {template: '{{ a b }}'}", "\nfor a column with a space in its name, write row['"),
        ("vars: {day: 07}", "vars.day must be a string; write it in quotes"),
    ],
)
def test_a_mistake_names_file_line_key_value_and_remedy(
    tmp_path: Path, line: str, message: str
) -> None:
    found = complaint(tmp_path, MINIMAL + line)
    assert found.startswith("job.yaml, line 5: ")
    assert message in found


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("logit_bias: {a: 1}", 'sampling.logit_bias has the key "a"; its keys must be token ids'),
        ('logit_bias: {"5": 100, "05": -100}', 'sampling.logit_bias has the key "05"'),
        ("logit_bias: {5: x}", 'sampling.logit_bias.5 is "x"; it must be a number'),
        ("min_tokens: 9", "sampling.min_tokens is 9; min_tokens must be less than or equal"),
    ],
)
def test_a_mistake_in_sampling(tmp_path: Path, keys: str, message: str) -> None:
    text = MINIMAL.replace("{max_tokens: 8}", f"\n  max_tokens: 8\n  {keys}")
    found = complaint(tmp_path, text)
    assert found.startswith("job.yaml, line 5: ")
    assert message in found


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        (
            "sampling: {max_tokens: 8}\n",
            "",
            "sampling is required, like sampling: {max_tokens: 64}",
        ),
        ("{path: out}", "{}", "job.yaml, line 4: output.path is required"),
        (
            "model: some/model",
            "model: {name: some/model, quantization: int3}",
            "job.yaml, line 1: model.quantization: int3 is not yet supported by this version; "
            "known: int8, int4, fp8",
        ),
        ("prompts.parquet", "3", "input.path is 3; it must be a string or a list"),
        ("8}", "8, prompt_logprobs: 2}", "add include: [prompt_logprobs] to the output section"),
        (
            "8}",
            "8, beam_width: 4}\nengine: {max_num_batched_tokens: 3}",
            "sampling.beam_width is more than engine.max_num_batched_tokens",
        ),
        ("prompts.parquet", "http://x/y", "input.path: this version cannot use http://"),
        ("prompts.parquet", '"a\\0b"', "input.path must be a path"),
        (
            "{path: out}",
            "{path: o, include: [prompt_logprobs]}",
            "output.include names prompt_logprobs, but sampling.prompt_logprobs is not set",
        ),
        ("{path: out}", "{path: o, rename: {a: c, b: c}}", "output.rename gives two columns"),
        ("out}", "o, reasoning: {start: a}}", "line 4: output.reasoning.end is required"),
        ("8}", "8, beam_width: 2}\naccept: {k: 1}", "accept with sampling.beam"),
    ],
)
def test_a_mistake_in_a_required_section(
    tmp_path: Path, was: str, becomes: str, message: str
) -> None:
    found = complaint(tmp_path, MINIMAL.replace(was, becomes))
    assert message in found
    assert "\n" not in found


def test_usage_error_lists_all_mistakes_up_to_a_limit(tmp_path: Path) -> None:
    found = complaint(tmp_path, MINIMAL + "".join(f"key{i}: 1\n" for i in range(30)))
    assert found.count("unknown key") == 8
    assert found.endswith("and 22 more")


def test_hostile_keys_and_values_are_shown_escaped(tmp_path: Path) -> None:
    found = complaint(tmp_path, MINIMAL + '"\\e[31m\\u202e": 1\nname: ["\\a"]')
    assert found.isprintable() or found.replace("\n", "").isprintable()


def test_invalid_filter_is_refused_without_reading_data(tmp_path: Path) -> None:
    text = MINIMAL.replace("prompts.parquet}", "prompts.parquet, filter: lenght(lang) > 1}")
    found = complaint(tmp_path, text)
    assert found.startswith("job.yaml, line 2: input.filter: lenght() is not an allowed function")


def test_credentials_in_a_url_are_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"input\.path contains credentials") as caught:
        load(tmp_path, MINIMAL.replace("prompts.parquet", "s3://key:secret@lake/x"))
    assert "secret" not in str(caught.value)


# Options


def test_set_changes_adds_and_reads_yaml(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        overrides=[
            "model.dtype=float32",
            "sampling.max_new_tokens=99",
            "sampling.stop=[a, b]",
            "engine.num_kv_blocks=7",
            "errors={max_error_rate: 1e-1}",
        ],
    )
    assert (spec.model.name, spec.model.dtype) == ("some/model", "float32")
    assert spec.sampling.max_tokens == 99
    assert spec.sampling.stop == ("a", "b")
    assert spec.engine.num_kv_blocks == 7
    assert spec.errors.max_error_rate == 0.1


@pytest.mark.parametrize("text", ["{{ x }}", "{% if x %}y{% endif %}", "a: b", "# x", "*", "a: ["])
def test_set_value_without_quotes_is_one_string(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, overrides=[f"prompt.template={text}"]).prompt.template == text


def test_set_value_in_quotes_is_a_string(tmp_path: Path) -> None:
    spec = load(tmp_path, overrides=['prompt.template="[INST]\\n# 3"', "sampling.stop=['3']"])
    assert (spec.prompt.template, spec.sampling.stop) == ("[INST]\n# 3", ("3",))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a..b=3", "has no key before the =; write --set section.key=VALUE"),
        ("prompt.template=[INST] {{ x }}", "needs quotes around it"),
        ("name=\udcff", "not valid"),
        ("scale.resources={num_cpus: 0}", "scale.resources.num_cpus is 0; it must be more than 0"),
    ],
)
def test_invalid_set_option_is_named_in_the_error(
    tmp_path: Path, override: str, message: str
) -> None:
    assert message in complaint(tmp_path, "version: 1\n" + MINIMAL, overrides=[override])


def test_invalid_option_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--workers 0: scale\.workers is 0; it must be"):
        load_job(write_job(tmp_path), options={"--workers 0": "scale.workers=0"})


def test_limit_and_output_options_override_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    spec = load(tmp_path / "jobs", output="elsewhere", limit=3)
    assert spec.output.path == str(tmp_path / "elsewhere")
    assert spec.input.limit == 3


def test_variables_fill_name_and_paths_only(tmp_path: Path) -> None:
    text = """\
name: "{{ ds }}-{{ kind }}"
vars: {ds: null, kind: daily}
model: models/{{ kind }}
input: {path: ["in/{{ ds }}.parquet", more.parquet]}
prompt: {template: "{{ ds }}"}
sampling: {max_tokens: 8, stop: "{{ ds }}"}
output: {path: "out/{{ ds }}"}
"""
    spec = load(tmp_path, text, variables={"ds": "x"})
    assert spec.name == "x-daily"
    assert spec.model.name == "models/daily"
    assert spec.input.paths == (str(tmp_path / "in/x.parquet"), str(tmp_path / "more.parquet"))
    assert spec.output.path == str(tmp_path / "out/x")
    assert spec.prompt.template == "{{ ds }}"
    assert spec.sampling.stop == ("{{ ds }}",)


# Presets


def test_engine_keys_override_the_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("max_num_seqs: 7\nblock_size: 32\n")
    text = MINIMAL + "engine: {preset: mine.yaml, block_size: 8}"
    spec = load(tmp_path, text, overrides=["engine.order=input"])
    assert spec.engine == EngineConfig(max_num_seqs=7, block_size=8, order="input")


@pytest.mark.parametrize(
    ("key", "message"),
    [("block_size: 0", "engine.block_size is 0"), ("preset: cpu", "unknown key engine.preset")],
)
def test_a_mistake_in_a_preset_names_its_line(tmp_path: Path, key: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"max_num_seqs: 7\n{key}\n")
    found = complaint(tmp_path, MINIMAL + "engine: {preset: mine.yaml}")
    assert found.startswith(f"engine preset mine.yaml, line 2: {message}")


# Paths


def test_paths_are_relative_to_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs" / "model").mkdir(parents=True)
    (tmp_path / "jobs" / "chat.jinja").write_text("{{ messages }}")
    text = MINIMAL.replace("some/model", "model").replace(
        "prompts.parquet", "'../in/[ab]*.parquet'"
    )
    write_job(tmp_path / "jobs", text + "prompt: {chat_template: chat.jinja}")
    monkeypatch.chdir(tmp_path)
    spec = load_job(Path("jobs/job.yaml"))
    assert spec.model.name == str(tmp_path / "jobs/model")
    assert spec.input.paths == (str(tmp_path / "in/[ab]*.parquet"),)
    assert spec.output.path == str(tmp_path / "jobs/out")
    assert spec.prompt.chat_template == str(tmp_path / "jobs/chat.jinja")


@pytest.mark.parametrize(
    ("name", "path"),
    [("./missing", "{}/missing"), ("/abs/model", "/abs/model"), ("~/model", "/home/me/model")],
)
def test_model_name_that_looks_like_a_path_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    spec = load(tmp_path, MINIMAL.replace("some/model", name).replace("prompts", "~/prompts"))
    assert spec.model.name == path.format(tmp_path)
    assert spec.input.paths == ("/home/me/prompts.parquet",)


def test_glob_characters_in_the_job_folder_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "run[1]"
    folder.mkdir()
    literal = load(folder)
    assert literal.input.paths == (str(folder / "prompts.parquet"),)
    pattern = load(folder, MINIMAL.replace("prompts.parquet", "'*.parquet'"))
    assert pattern.input.paths == (str(tmp_path / "run[[]1]" / "*.parquet"),)


# Random values

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
keys_of_the_file = st.sampled_from(
    [line.split(":")[0].strip() for line in EVERY_KEY.splitlines() if ":" in line]
)


def as_flow(value: object) -> str:
    """Return ``value`` as YAML flow text; only texts of odd length are quoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_flow(k)}: {as_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_flow(item) for item in value) + "]"
    if isinstance(value, str) and len(value) % 2:
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


fuzzed_lines = st.builds(
    lambda key, value: f"{key}: {as_flow(value)}", keys_of_the_file, json_values
)
cut_files = st.builds(
    lambda start, end, middle: EVERY_KEY[:start] + middle + EVERY_KEY[end:],
    st.integers(0, len(EVERY_KEY)),
    st.integers(0, len(EVERY_KEY)),
    st.text(max_size=5),
)


@given(fuzzed_lines.map(lambda line: MINIMAL + line) | cut_files | st.text(max_size=30))
@example(MINIMAL + "prompt: {template: '" + "(" * 10_000 + "'}")
@example(MINIMAL + "prompt: {template: '{{ " + "(" * 2_000 + "'}")
@example(MINIMAL + "name: '" + "{{" * 10_000 + "'")
@example("x" * 1_000_000)
@example("a:\n" * 20_000)
def test_any_file_is_a_job_or_a_short_usage_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_job(path, variables={"ds": "x"} if "ds" in text else {})
    except UsageError as error:
        lines = str(error).splitlines()
        assert 1 <= len(lines) <= MOST_LINES
        assert all(line.isprintable() for line in lines)
