"""Whole jobs whose rows choose adapters: each row's result equals peft's for that row alone."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchinfer import LLM, LoRARequest, SamplingParams
from batchinfer.cli.commands import main
from batchinfer.config import SCORING
from batchinfer.errors import ExitCode, LockedError, ModelError
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.lora import make_adapter
from tests.models import make_text_model, tiny_model

OUTPUT_TOKENS = 6
GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
BAD = {5: ("nope", "unknown_adapter"), 13: (b"\xff", "invalid_utf8")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and two adapters for it."""
    folder = tmp_path_factory.mktemp("adapted")
    model = make_text_model(folder / "model")
    for seed, name, targets in ((1, "one", "all-linear"), (2, "two", ["q_proj", "down_proj"])):
        base = AutoModelForCausalLM.from_pretrained(model)
        make_adapter(base, folder / name, seed=seed, r=4, lora_alpha=8, target_modules=targets)
    return folder


def write_rows(path: Path, count: int) -> list[Any]:
    """Write prompts in groups of three with a common start; return the names of their adapters."""
    names: list[Any] = [(None, "one", "two")[row * 7 % 3] for row in range(count)]
    for row, (name, _) in BAD.items():
        names[row] = name
    names[11] = ""  # CSV stores missing values as empty texts
    column = pa.array([n.encode() if isinstance(n, str) else n for n in names], pa.binary())
    table = {
        "prompt": [f"Some words shared by all, then number {row // 3}" for row in range(count)],
        "lora": pa.Array.from_buffers(pa.string(), count, column.buffers()),
    }
    pq.write_table(pa.table(table), path)
    return names


def job(tmp_path: Path, folder: Path, **sections: dict[str, Any]) -> JobSpec:
    names = {name: str(folder / name) for name in ("one", "two")}
    fields: dict[str, Any] = {
        "model": {"name": str(folder / "model"), "adapters": names},
        "input": {"path": str(tmp_path / "rows.parquet")},
        "prompt": {"column": "prompt", "chat_template": "none", "adapter_column": "lora"},
        "sampling": {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True},
        "engine": {"num_kv_blocks": 60},
        "output": {"path": str(tmp_path / "out"), "include": ["token_ids"]},
        "errors": {"max_error_rate": 0.2},
    }
    for name, values in sections.items():
        fields[name] = fields[name] | values
    return JobSpec.model_validate(fields)


@torch.inference_mode()
def test_job_with_mixed_adapters_equals_peft(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    names = write_rows(tmp_path / "rows.parquet", 36)
    spec = job(tmp_path, folder)
    assert run_job(spec, quiet=True) is ExitCode.OK
    rows = pq.read_table(tmp_path / "out" / "data").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    alone = {}
    for name in (None, "one", "two"):
        base = AutoModelForCausalLM.from_pretrained(folder / "model")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alone[name] = base if name is None else PeftModel.from_pretrained(base, folder / name)
    for at, (row, name) in enumerate(zip(rows, names, strict=True)):
        if at in BAD:
            assert row["error"]["code"] == BAD[at][1]
            continue
        ids = tokenizer(row["prompt"], return_tensors="pt")
        wanted = alone[name or None].generate(
            **ids, max_new_tokens=OUTPUT_TOKENS, min_new_tokens=OUTPUT_TOKENS, do_sample=False
        )
        assert row["outputs"][0]["token_ids"] == wanted[0, -OUTPUT_TOKENS:].tolist(), name
    message = rows[5]["error"]["message"]
    assert message == "column lora: there is no adapter 'nope'; known: one, two"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["tokens"]["prompt_cached"] > summary["tokens"]["prompt_computed"]
    planned = plan_job(spec, device="cpu")
    assert summary["model"]["adapter_bytes"] == planned["model"]["adapter_bytes"] > 0


def test_prompt_adapter_applies_to_all_rows(folder: Path, tmp_path: Path) -> None:
    table = {"prompt": ["Some words", "and more"], "lora": ["two", "two"]}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    ways = {"column": {}, "key": {"prompt": {"adapter_column": None, "adapter": "two"}}}
    texts = []
    for name, sections in ways.items():
        spec = job(tmp_path, folder, **sections, output={"path": str(tmp_path / name)})
        assert run_job(spec, quiet=True) is ExitCode.OK
        texts.append(pq.read_table(tmp_path / name / "data")["outputs"].to_pylist())
    assert texts[0] == texts[1]


@torch.inference_mode()
def test_score_job_uses_each_rows_adapter(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    prompt, completion, names = "Some words", " and some more", [None, "one", "two"]
    table = {"prompt": [prompt] * 3, "choices": [[completion]] * 3, "lora": names}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    fields = job(tmp_path, folder).model_dump(exclude={"sampling"}, by_alias=True)
    fields["sampling"] = asdict(SCORING)
    fields |= {"task": "score", "score": {"completions_column": "choices"}}
    assert run_job(JobSpec.model_validate(fields), quiet=True) is ExitCode.OK
    ids = AutoTokenizer.from_pretrained(folder / "model")(prompt + completion, return_tensors="pt")
    for row, name in zip(pq.read_table(tmp_path / "out" / "data").to_pylist(), names, strict=True):
        alone = AutoModelForCausalLM.from_pretrained(folder / "model")
        if name is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                alone = PeftModel.from_pretrained(alone, folder / name)
        logprobs = alone(**ids).logits[0, :-1].log_softmax(dim=-1)
        wanted = logprobs.gather(1, ids["input_ids"][0, 1:, None])[row["num_prompt_tokens"] - 1 :]
        assert row["score"][0]["sum_logprob"] == pytest.approx(float(wanted.sum()), abs=1e-3), name


def test_retrained_adapter_changes_the_job_fingerprint(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", 36)
    base = tiny_model("llama", vocab_size=259)
    for name in ("one", "two"):
        make_adapter(base, tmp_path / name, seed=9, r=4, target_modules=["q_proj"])
    (tmp_path / "model").symlink_to(folder / "model")
    assert run_job(job(tmp_path, tmp_path), quiet=True) is ExitCode.OK
    base = tiny_model("llama", vocab_size=259)
    make_adapter(base, tmp_path / "two", seed=10, r=4, target_modules=["q_proj"])
    with pytest.raises(LockedError, match=r"adapter_model\.safetensors of the adapter two"):
        run_job(job(tmp_path, tmp_path), quiet=True)


def test_adapter_of_another_model_exits_5(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_rows(tmp_path / "rows.parquet", 36)
    wide = tiny_model("llama", hidden_size=64)
    make_adapter(wide, tmp_path / "two", seed=9, r=4, target_modules=["q_proj"])
    job_file = tmp_path / "job.json"
    fields = json.loads(job(tmp_path, folder).model_dump_json(by_alias=True))
    fields["model"]["adapters"]["two"] = "./two"
    job_file.write_text(json.dumps(fields))
    for verb in ("run", "plan"):
        monkeypatch.setattr("sys.argv", ["batchinfer", verb, str(job_file)])
        with pytest.raises(SystemExit) as done:
            main()
        assert done.value.code == ExitCode.MODEL
        said = capsys.readouterr().err
        assert f"model.adapters.two: {tmp_path / 'two'} is not an adapter of this model" in said
        assert "q_proj.lora_A.weight is 4 x 64, but it should be 4 x 32" in said
    assert not list((tmp_path / "out" / "data").iterdir())


def test_plan_counts_adapter_bytes(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", 36)
    planned = plan_job(job(tmp_path, folder), device="cpu")
    alone = plan_job(
        job(tmp_path, folder, model={"adapters": {}}, prompt={"adapter_column": None}), device="cpu"
    )
    parameters = 3 * (4 * (64 + 48 + 48 + 64) + 3 * 4 * 80) + 3 * (4 * 64 + 4 * 80)
    assert planned["model"]["adapter_bytes"] == 4 * parameters
    assert planned["model"]["weight_bytes"] == alone["model"]["weight_bytes"]
    assert planned["errors"] == {"unknown_adapter": 1, "invalid_utf8": 1}
    assert planned["prompt_computed"] > alone["prompt_computed"], "adapters share nothing"


def test_generate_selects_adapter_per_prompt(folder: Path) -> None:
    names = {name: folder / name for name in ("one", "two")}
    llm = LLM(folder / "model", adapters=names, num_kv_blocks=60)
    each = [None, "one", "two", "one"]
    outputs = llm.generate(["Some words"] * 4, GREEDY, adapter=each, use_tqdm=False)
    texts = [output.outputs[0].token_ids for output in outputs]
    assert texts[1] == texts[3]
    assert len({tuple(text) for text in texts}) == 3
    for name, text in zip(each, texts, strict=True):
        (output,) = llm.generate("Some words", GREEDY, adapter=name, use_tqdm=False)
        assert output.outputs[0].token_ids == text
    chat = [{"role": "user", "content": "hi"}]
    answers = [llm.chat(chat, GREEDY, adapter=n, use_tqdm=False) for n in (None, "one")]
    assert answers[0][0].outputs[0].text != answers[1][0].outputs[0].text
    with pytest.raises(
        ValueError, match="there is no adapter 'three'; the loaded adapters are: one, two"
    ):
        llm.generate("a", GREEDY, adapter="three", use_tqdm=False)


def test_lora_request_selects_adapter_by_name_or_path(folder: Path) -> None:
    llm = LLM(folder / "model", num_kv_blocks=32, adapters={"sql": folder / "one"})

    def run(prompt: str, **options: Any) -> Any:
        return llm.generate(prompt, GREEDY, use_tqdm=False, **options)[0]

    own, by_name, by_path, base = llm.generate(
        ["abc"] * 4,
        GREEDY,
        lora_request=[
            LoRARequest("sql"),
            LoRARequest("sql", 1, str(folder / "one")),
            LoRARequest("another name", 2, str(folder / "one")),
            None,
        ],
        use_tqdm=False,
    )
    expected = run("abc", adapter="sql").outputs[0].token_ids
    assert {tuple(one.outputs[0].token_ids) for one in (own, by_name, by_path)} == {tuple(expected)}
    assert base.outputs[0].token_ids != expected
    assert own.lora_request == LoRARequest("sql")
    (chat,) = llm.chat([{"role": "user", "content": "a"}], GREEDY, lora_request=own.lora_request)
    assert chat.lora_request == own.lora_request
    with pytest.raises(ValueError, match=r"'x' is not loaded; .*LLM\(..., .*enable_lora"):
        run("a", lora_request=LoRARequest("x", 3, "/nope"))
    with pytest.raises(ValueError, match="mean the same; keep one"):
        run("a", lora_request=LoRARequest("sql"), adapter="sql")
    with pytest.raises(ValueError, match="1 prompts, but 2 lora_requests"):
        run("a", lora_request=[None, None])


def test_enable_lora_loads_adapters_on_first_use(folder: Path) -> None:
    names = {name: folder / name for name in ("one", "two")}
    loaded = LLM(folder / "model", num_kv_blocks=32, adapters=names)
    llm = LLM(folder / "model", num_kv_blocks=32, enable_lora=True)

    def tokens(model: LLM, **options: Any) -> list[int]:
        return model.generate("a", GREEDY, use_tqdm=False, **options)[0].outputs[0].token_ids

    plain, one, two = (tokens(loaded, adapter=name) for name in (None, "one", "two"))
    first, second = (LoRARequest(name, 1, str(path)) for name, path in names.items())
    assert tokens(llm) == plain
    requests = [first, None, second, first]
    outputs = llm.generate(["a"] * 4, GREEDY, lora_request=requests, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [one, plain, two, one]
    assert tokens(llm, adapter="two") == two
    # The same name with another folder is another adapter; each folder is loaded once.
    again = LoRARequest("one", 7, lora_local_path=str(names["two"]))
    assert tokens(llm, lora_request=again) == two
    with pytest.raises(ModelError, match=r"model.adapters.broken"):
        tokens(llm, lora_request=LoRARequest("broken", 3, str(folder / "broken")))
    with pytest.raises(ValueError, match="its lora_path is empty"):
        tokens(llm, lora_request=LoRARequest("other"))
    assert tokens(llm, lora_request=first) == one
