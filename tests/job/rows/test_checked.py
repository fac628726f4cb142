"""Jobs whose schemas no grammar can fully enforce: rows without error match their schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer import LLM, SamplingParams
from batchinfer.errors import ExitCode, UsageError
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.requests.resampling import CHECKED_TRIES
from tests.models import make_text_model
from tests.text.hard_schemas import HARD_SCHEMAS

LETTERS = {"enum": list("abcdefgh"), "not": {"enum": list("abcd")}}
"""A schema that half of the grammar's outputs match."""
NEVER = {"enum": list("abc"), "not": {}}
_ECMA_ONLY = (r"\\cJ", r"\\p{", r"\\W")
r"""Escapes, in JSON, that Python's regular expressions lack or read differently.

For example, Python's ``\W`` does not match letters beyond ASCII.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checking")
    make_text_model(path / "model")
    return path


def checked(schema: Any) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema, "unsupported": "check"}}


def run(
    folder: Path, name: str, cells: list[dict[str, Any] | None], more: str = "", **changes: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a job; return its output rows and its summary."""
    column = [cell and json.dumps(cell) for cell in cells]
    prompts = [f"Row {at}:" for at in range(len(cells))]
    pq.write_table(
        pa.table({"prompt": prompts, "sampling_params": column}), folder / f"{name}.parquet"
    )
    job = folder / f"{name}.yaml"
    job.write_text(
        f"model: {{name: model, dtype: float32}}\ninput: {{path: {name}.parquet}}\n"
        "prompt: {chat_template: none}\nsampling: {max_tokens: 40, seed: 3}\n"
        f"{more}\nengine: {{num_kv_blocks: 400, max_num_seqs: 64}}\n"
        f"output: {{path: {name}}}\nerrors: {{max_error_rate: 1.0}}\n"
    )
    overrides = [f"{key}={value}" for key, value in changes.items()]
    assert run_job(load_job(job, overrides=overrides), quiet=True) is ExitCode.OK
    rows = pq.read_table(folder / name / "data").to_pylist()
    return rows, json.loads((folder / name / "summary.json").read_text())


def is_valid(schema: Any, text: str) -> bool:
    """Validate with jsonschema, which the program does not use to check rows."""
    make = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    checker = make.FORMAT_CHECKER
    return bool(make(schema, format_checker=checker).is_valid(json.loads(text)))


def test_rows_without_error_match_their_schema(folder: Path) -> None:
    schemas = list(HARD_SCHEMAS.values())
    rows, summary = run(folder, "all", [checked(schema) for schema in schemas])
    num_ok = 0
    for schema, row in zip(schemas, rows, strict=True):
        if row["status"] == "error":
            assert row["error"]["code"] == "invalid_structured_output"
            assert row["generated_text"] is None
            continue
        num_ok += 1
        if not any(part in json.dumps(schema) for part in _ECMA_ONLY):
            assert is_valid(schema, row["generated_text"])
    assert num_ok > 250
    assert num_ok == summary["accept"]["samples_accepted"]


def test_samples_that_fail_the_schema_are_drawn_again(folder: Path) -> None:
    cells = [checked(LETTERS), {**checked(LETTERS), "n": 3}, checked(NEVER), None] * 12
    rows, summary = run(folder, "again", cells)
    num_samples = 0
    for cell, row in zip(cells, rows, strict=True):
        if cell is None:
            assert row["status"] == "ok"
            continue
        samples = row["outputs"]
        assert all(is_valid(LETTERS, sample["text"]) for sample in samples)
        assert [sample["index"] for sample in samples] == list(range(len(samples)))
        assert (row["status"] == "ok") == (len(samples) == cell.get("n", 1))
        assert row["status"] == "ok" or not row["error"]["message"].endswith("it is allowed")
        if cell == checked(NEVER):
            assert row["error"]["message"].startswith(f"too few of {CHECKED_TRIES} samples match")
        num_samples += len(samples)
    counts = summary["accept"]
    assert counts["samples_accepted"] == num_samples
    assert counts["samples_tried"] == sum(counts.values()) - counts["samples_tried"]
    assert counts["samples_rejected"] >= 12 * CHECKED_TRIES
    ok = [row["status"] == "ok" for row in rows if row["row_id"] % 4 == 0]
    assert sum(ok) >= 10  # of 12; with a single try, only half would pass


def test_greedy_samples_are_not_drawn_again(folder: Path) -> None:
    rows, summary = run(folder, "greedy", [{**checked(NEVER), "temperature": 0.0}] * 3)
    for row in rows:
        assert row["error"]["code"] == "invalid_structured_output"
        assert row["error"]["message"].startswith("too few of 1 samples match the schema")
    assert summary["accept"]["samples_tried"] == 3


def test_a_truncated_text_fails_the_schema(folder: Path) -> None:
    long = {"type": "string", "minLength": 60, "not": {"const": ""}}
    (row,), _ = run(folder, "cut", [checked(long)])
    assert row["error"]["message"].endswith(
        "last sample that does not match: it was cut off at 40 tokens"
    )


def test_accept_sets_the_tries_and_prevents_errors(folder: Path) -> None:
    accept = "accept: {max_tries: 3, regex: '[e-h]'}"
    rows, summary = run(folder, "accepted", [checked(LETTERS), checked(NEVER)] * 8, accept)
    assert {row["status"] for row in rows} == {"ok"}
    texts = [sample["text"] for row in rows for sample in row["outputs"]]
    assert texts
    assert all(is_valid(LETTERS, text) for text in texts)
    assert summary["accept"]["samples_tried"] <= 16 * 3
    assert {len(row["outputs"]) for row in rows if row["row_id"] % 2} == {0}


def test_the_job_may_ask_for_a_checked_schema(folder: Path) -> None:
    asked = {"json": LETTERS, "unsupported": "check"}
    changes = {"sampling.structured_outputs": json.dumps(asked)}
    rows, _ = run(folder, "job", [None] * 6, **changes)
    ok = [row for row in rows if row["status"] == "ok"]
    assert ok
    assert all(is_valid(LETTERS, row["generated_text"]) for row in ok)
    for schema, message in [
        ({"type": "strnig"}, "schema is not valid"),
        (False, "no text can match"),
    ]:
        wrong = json.dumps({"json": schema, "unsupported": "check"})
        with pytest.raises(UsageError, match=rf"sampling\.structured_outputs: {message}"):
            run(folder, "wrong", [None], **{"sampling.structured_outputs": wrong})


def test_from_python(folder: Path) -> None:
    llm = LLM(str(folder / "model"), dtype="float32", num_kv_blocks=200)
    params = [
        SamplingParams(max_tokens=20, seed=at, n=1 + at % 2, **checked(schema))
        for at, schema in enumerate([LETTERS, NEVER] * 8)
    ]
    outputs = llm.generate([f"Row {at}:" for at in range(16)], params, use_tqdm=False)
    for at, output in enumerate(outputs):
        assert (output.error is None) == (len(output.outputs) == params[at].n)
        assert all(is_valid(LETTERS, sample.text) for sample in output.outputs)
        if output.error is not None:
            assert output.error.code == "invalid_structured_output"
    assert [output.error is None for output in outputs[1::2]] == [False] * 8
    assert sum(output.error is None for output in outputs[::2]) >= 6
