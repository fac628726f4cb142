from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.errors import UsageError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.output.schema import OutputTable, output_table
from batchinfer.job.spec.task_keys import GENERATE
from tests.job.datasets import strings, write_parquet
from tests.job.fakes import job

LOGPROBS = (
    "list<item: struct<token_id: int32, logprob: float, rank: int32, "
    "top: list<item: struct<token_id: int32, logprob: float>>>>"
)
OUTPUT = (
    "index: int32, text: string, finish_reason: string, stop_reason: string, num_tokens: int32, "
    "cumulative_logprob: double"
)
GENERATED = {
    "row_id": "int64",
    "generated_text": "string",
    "outputs": f"list<item: struct<{OUTPUT}>>",
    "num_prompt_tokens": "int32",
    "num_output_tokens": "int32",
    "truncated": "bool",
    "status": "string",
    "error": "struct<code: string, message: string>",
}


def table_of(tmp_path: Path, columns: dict[str, Any], **sections: Any) -> OutputTable:
    path = write_parquet(tmp_path / "in" / "x.parquet", columns)
    return output_table(open_source(str(path)), job(tmp_path, **sections))


def types(schema: pa.Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def test_generated_columns_match_the_contract(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"prompt": ["a"]})
    assert types(table.generated_schema) == GENERATED


def test_output_include_adds_columns(tmp_path: Path) -> None:
    include = ["prompt", "token_ids", "logprobs", "prompt_logprobs"]
    table = table_of(
        tmp_path,
        {"text": ["a"]},
        output={"include": include},
        sampling={"logprobs": 1, "prompt_logprobs": 1},
    )
    added = f"{OUTPUT}, token_ids: list<item: int32>, logprobs: {LOGPROBS}"
    assert types(table.generated_schema) == {
        **GENERATED,
        "outputs": f"list<item: struct<{added}>>",
        "prompt": "string",
        "prompt_logprobs": LOGPROBS,
    }


def test_kept_columns_keep_their_types_and_come_first(tmp_path: Path) -> None:
    columns = {
        "prompt": pa.array(["a"], pa.large_string()),
        "label": pa.array(["x"]).dictionary_encode(),
        "view": pa.array(["v"], pa.string_view()),
        "tags": [["t"]],
        "who": [{"name": "n", "age": 3}],
    }
    table = table_of(tmp_path, columns)
    assert types(table.kept_schema) == {
        "prompt": "large_string",
        "label": "dictionary<values=string, indices=int32, ordered=0>",
        "view": "string_view",
        "tags": "list<element: string>",
        "who": "struct<name: string, age: int64>",
    }


def test_keep_columns_and_id_column(tmp_path: Path) -> None:
    sections = {"input": {"keep_columns": ["b"], "id_column": "id"}}
    table = table_of(tmp_path, {"a": [1], "b": [2], "id": [3]}, **sections)
    assert table.kept_schema.names == ["b", "id"]


@pytest.mark.parametrize(
    ("columns", "output"),
    [
        ({"status": ["new"]}, {}),
        ({"prompt": ["a"]}, {"include": ["prompt"]}),
        ({"a": [1], "b": [2]}, {"rename": {"a": "b"}}),
        ({"a": [1]}, {"rename": {"a": "outputs"}}),
    ],
)
def test_column_collision_suggests_output_rename(tmp_path: Path, columns: Any, output: Any) -> None:
    with pytest.raises(UsageError, match=r"output\.rename"):
        table_of(tmp_path, columns, output=output)


def test_output_rename(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"status": ["new"]}, output={"rename": {"status": "input_status"}})
    assert table.kept_schema.names == ["input_status"]


def test_output_table_replaces_invalid_utf8(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"prompt": strings([b"a", b"\xff"])})
    kept = pa.record_batch([strings([b"a", b"\xff"])], names=["prompt"])
    rows = [{"row_id": 0, "status": "ok"}, {"row_id": 1, "status": "error"}]
    made = table.columns([kept], pa.Table.from_pylist(rows, schema=table.generated_schema))
    made.validate(full=True)
    assert made["prompt"].to_pylist() == ["a", "\N{REPLACEMENT CHARACTER}"]
    assert made["row_id"].to_pylist() == [0, 1]
    assert made["outputs"].to_pylist() == [None, None]


@pytest.mark.parametrize("include", [(), ("prompt", "token_ids"), ("prompt_logprobs",)])
def test_generated_columns_match_the_task_spec(tmp_path: Path, include: tuple[str, ...]) -> None:
    sampling = {"prompt_logprobs": 0} if "prompt_logprobs" in include else {}
    sections = {"output": {"include": include}, "sampling": sampling}
    names = table_of(tmp_path, {"text": ["a"]}, **sections).generated_schema.names
    assert tuple(names) == GENERATE.columns(include)
