"""Whole jobs on a tiny random model: good rows are right, and bad rows have error codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchinfer.errors import ExitCode, UsageError
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec

NUM_ROWS = 120
OUTPUT_TOKENS = 6
TEMPLATE = "{{ text }}{{ '' if 10 // divisor else '' }}"
BAD = {
    7: ("empty_prompt", {"text": b"  "}),
    23: ("prompt_too_long", {"text": b"x" * 600}),
    41: ("invalid_utf8", {"text": b"broken \xff here"}),
    58: ("template_error", {"divisor": 0}),
    77: ("does_not_fit", {"sampling_params": '{"max_tokens": 400}'}),
    101: ("bad_sampling_params", {"sampling_params": '{"temprature": 1}'}),
}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {"text": b"Shared words, then number %d" % row, "divisor": 1, "sampling_params": None}
        for row in range(NUM_ROWS)
    ]
    for row, (_, changes) in BAD.items():
        rows[row] |= changes
    text = pa.array([row["text"] for row in rows], pa.binary())
    path = tmp_path / "rows.parquet"
    table = {
        "text": pa.Array.from_buffers(pa.string(), NUM_ROWS, text.buffers()),
        "divisor": [row["divisor"] for row in rows],
        "sampling_params": pa.array([row["sampling_params"] for row in rows], pa.string()),
    }
    pq.write_table(pa.table(table), path, row_group_size=32)
    return path


def job(dataset: Path, model: Path, **sections: dict[str, Any]) -> JobSpec:
    fields: dict[str, Any] = {
        "model": {"name": str(model)},
        "input": {"path": str(dataset)},
        "prompt": {"template": TEMPLATE, "chat_template": "none"},
        "sampling": {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True},
        "engine": {"num_kv_blocks": 24},
        "output": {"path": str(dataset.parent / "out"), "include": ["token_ids"]},
        "errors": {"max_error_rate": 0.1},
    }
    for name, values in sections.items():
        fields[name] = fields[name] | values
    return JobSpec.model_validate(fields)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_token_id_outside_vocabulary_is_refused_before_weights_are_loaded(
    dataset: Path, model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr("batchinfer.builders.engine.load_model")
    ids: Any = {259: 1.0} if name == "logit_bias" else (259,)
    message = f"^sampling.{name} has token id 259; the model's token ids are below 259"
    with pytest.raises(UsageError, match=message):
        run_job(job(dataset, model, sampling={name: ids}), quiet=True)


def rows_of(spec: JobSpec) -> list[dict[str, Any]]:
    return pq.read_table(sorted(Path(spec.output.path, "data").iterdir())).to_pylist()


@torch.inference_mode()
def test_good_rows_are_right_and_bad_rows_have_error_codes(dataset: Path, model: Path) -> None:
    spec = job(dataset, model, output={"rows_per_part": 50})
    assert run_job(spec, quiet=True) is ExitCode.OK
    reference, tokenizer = (
        cls.from_pretrained(model) for cls in (AutoModelForCausalLM, AutoTokenizer)
    )
    rows = rows_of(spec)
    assert [row["row_id"] for row in rows] == list(range(NUM_ROWS))
    for row in rows:
        if row["row_id"] in BAD:
            code = BAD[row["row_id"]][0]
            assert (row["status"], row["error"]["code"]) == ("error", code)
            assert row["generated_text"] is None
            continue
        assert (row["status"], row["error"]) == ("ok", None)
        prompt, output = tokenizer(row["text"])["input_ids"], row["outputs"][0]["token_ids"]
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        taken = logits[torch.arange(OUTPUT_TOKENS), torch.tensor(output)]
        assert (logits.max(dim=1).values - taken).max() < 1e-4
        assert row["generated_text"] == tokenizer.decode(output, skip_special_tokens=True)


def test_outputs_do_not_depend_on_order_or_pool(dataset: Path, model: Path) -> None:
    sampled = {"temperature": 1.0, "n": 2}
    texts = []
    for at, engine in enumerate(({}, {"order": "input"}, {"num_kv_blocks": 400, "block_size": 4})):
        path = str(dataset.parent / f"out{at}")
        spec = job(dataset, model, sampling=sampled, engine=engine, output={"path": path})
        run_job(spec, quiet=True)
        good = [row for row in rows_of(spec) if row["row_id"] not in BAD]
        texts.append([[output["token_ids"] for output in row["outputs"]] for row in good])
    assert texts[0] == texts[1] == texts[2]
