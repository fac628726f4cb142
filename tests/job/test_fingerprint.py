"""Which changes to a job change its fingerprint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchinfer.errors import UsageError
from batchinfer.job.fingerprint import differences, digest, fingerprint_facts
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import JobSpec
from tests.job.job_files import write_job

MODEL = {"weights": "abc", "tokenizer": "def"}


def fingerprint(spec: JobSpec, model_facts: dict[str, str]) -> str:
    return digest(fingerprint_facts(spec, model_facts))


def job(folder: Path, *overrides: str) -> JobSpec:
    return load_job(write_job(folder), overrides=overrides)


def test_later_fields_leave_older_fingerprints_unchanged(tmp_path: Path) -> None:
    """A field that is added later must be in ``_LATER``, or older outputs cannot be resumed."""
    facts = fingerprint_facts(job(tmp_path), MODEL)
    assert set(facts["prompt"]) == {
        *("column", "template", "messages", "token_ids_column", "adapter_column", "system"),
        *("chat_template", "chat_template_kwargs", "parse_special_tokens", "on_too_long"),
    }
    assert set(facts["input"]) == {"format", "id_column", "filter", "keep_columns", "limit"}


@pytest.mark.parametrize(
    "override",
    [
        "prompt.images=a",
        "sampling.max_tokens=9",
        "sampling.seed=1",
        "sampling.stop=[x]",
        "prompt.template=x",
        "prompt.system=x",
        "prompt.parse_special_tokens=true",
        "model.dtype=float32",
        "model.max_model_len=9",
        "input.limit=9",
        "input.keep_columns=[a]",
        "input.id_column=a",
        "input.encoding=cp1252",
        "input.encoding_errors=replace",
        "input.delimiter=;",
        "input.json_field=rows",
        "output.rows_per_part=9",
        "output.include=[prompt]",
        "output.rename={a: b}",
        "output.reasoning={start: a, end: b}",
        "output.tool_parser=hermes",
        "prompt.tool_choice=none",
    ],
)
def test_fingerprint_changes_with_keys_that_change_the_output(
    tmp_path: Path, override: str
) -> None:
    before, after = job(tmp_path), job(tmp_path, override)
    assert fingerprint(before, MODEL) != fingerprint(after, MODEL)
    facts = [fingerprint_facts(spec, MODEL) for spec in (before, after)]
    [key] = differences(*facts)
    assert key.startswith(override.partition("=")[0])


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "input.path=other.parquet",
        "input.schema=union",  # files that both formats can read give the same rows
        "output.path=other",
        "output.if_exists=error",
        "output.partition_by=[a]",
        "output.reasoning=none",
        "output.tool_parser=none",
        "prompt.tools=null",
        "prompt.tool_choice=auto",
        "sampling.max_reasoning_tokens=null",
        "errors.max_error_rate=1",
        "stats.every_steps=9",
        "engine.order=input",
        "engine.order_window=9",
        "engine.num_kv_blocks=9",
        "engine.block_size=9",
        "engine.num_threads=2",
        "engine.max_num_seqs=9",
        "engine.enable_prefix_caching=false",
        "engine.preset=cpu",
        "sampling.temperature=1",
        "sampling.seed=0",
        "model.name=./copied",
    ],
)
def test_fingerprint_ignores_keys_that_do_not_change_the_output(
    tmp_path: Path, override: str
) -> None:
    assert fingerprint(job(tmp_path), MODEL) == fingerprint(job(tmp_path, override), MODEL)


def test_fingerprint_is_equal_for_synonyms_of_a_dtype(tmp_path: Path) -> None:
    names = ("auto", "fp8", "fp8_e4m3")
    specs = [job(tmp_path, f"engine.kv_cache_dtype={name}") for name in names]
    plain, short, long = (fingerprint(spec, MODEL) for spec in specs)
    assert plain != short == long


def test_fingerprint_uses_adapter_content_not_path(tmp_path: Path) -> None:
    place = "model={name: m, adapters: {a: %s}}"
    column = "prompt.adapter_column=c"
    here, there = (job(tmp_path, place % folder, column) for folder in ("./here", "./there"))
    facts = MODEL | {"adapters": {"a": {"adapter_config.json": "123"}}}
    other = MODEL | {"adapters": {"a": {"adapter_config.json": "456"}}}
    assert fingerprint(here, facts) == fingerprint(there, facts)
    both = fingerprint_facts(here, facts), fingerprint_facts(here, other)
    assert list(differences(*both)) == ["model.adapters.a.adapter_config.json"]


def test_fingerprint_changes_with_weights(tmp_path: Path) -> None:
    spec = job(tmp_path)
    other = {**MODEL, "weights": "xyz"}
    assert fingerprint(spec, MODEL) != fingerprint(spec, other)
    assert list(differences(fingerprint_facts(spec, MODEL), fingerprint_facts(spec, other))) == [
        "model_facts.weights"
    ]


def test_fingerprint_uses_chat_template_content(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
    a, b, c = (fingerprint(job(tmp_path, f"prompt.chat_template={n}"), {}) for n in "abc")
    assert a == b != c


def test_missing_chat_template_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    spec = job(tmp_path, "prompt.chat_template=a")
    (tmp_path / "a").unlink()
    with pytest.raises(UsageError, match=r"prompt\.chat_template: .*No such file"):
        fingerprint(spec, {})


def test_fingerprint_differences_name_each_key(tmp_path: Path) -> None:
    before = fingerprint_facts(
        job(tmp_path, "sampling.logit_bias={5: 1}", "output.rename={a: b}"), MODEL
    )
    assert list(differences(json.loads(json.dumps(before)), before)) == []
    after = fingerprint_facts(job(tmp_path, "sampling.n=2", "input.limit=1"), MODEL)
    assert list(differences(before, after)) == [
        "input.limit",
        "output.rename.a",
        "sampling.logit_bias",
        "sampling.n",
    ]
