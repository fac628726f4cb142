"""Columns that no request can be made of are found from the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.config import PromptConfig
from batchinfer.errors import DataError, UsageError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.rows.column_checks import check_prompt_columns
from batchinfer.job.run.run import run_job
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
TEXT = pa.array(["a"])


def check(tmp_path: Path, columns: dict[str, Any], **prompt: Any) -> None:
    path = write_parquet(tmp_path / "x.parquet", columns)
    check_prompt_columns(PromptConfig(**prompt), open_source(str(path)))


@pytest.mark.parametrize(
    "column",
    [
        TEXT,
        TEXT.cast(pa.large_string()),
        TEXT.cast(pa.binary()),
        TEXT.dictionary_encode(),
        pa.nulls(1),
        pa.array([[]], pa.list_(MESSAGE)),
        pa.array([[]], pa.large_list(MESSAGE)),
    ],
    ids=lambda column: str(column.type),
)
def test_texts_and_conversations_are_prompts(tmp_path: Path, column: pa.Array) -> None:
    check(tmp_path, {"prompt": column})


@pytest.mark.parametrize(
    ("column", "kind"),
    [([1], "int64"), ([1.5], "double"), ([True], "bool"), ([["a"]], "list<"), ([{"a": 1}], "stru")],
)
def test_another_type_is_named_with_file_column_and_what_it_must_be(
    tmp_path: Path, column: list[object], kind: str
) -> None:
    wanted = r"it must be string or list<struct<role, content>>"
    with pytest.raises(DataError, match=rf"x\.parquet: column prompt is {kind}.*; {wanted}"):
        check(tmp_path, {"prompt": column})


@pytest.mark.parametrize("column", [TEXT, TEXT.dictionary_encode(), pa.nulls(1)])
def test_names_of_adapters_are_texts(tmp_path: Path, column: pa.Array) -> None:
    check(tmp_path, {"prompt": TEXT, "a": column}, adapter_column="a")


def test_what_names_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompt.adapter_column: .*column a is int64; .* string"):
        check(tmp_path, {"prompt": TEXT, "a": [1]}, adapter_column="a")
    with pytest.raises(DataError, match=r'adapter_column: the data has no column "b"'):
        check(tmp_path, {"prompt": TEXT}, adapter_column="b")


@pytest.mark.parametrize("column", [[[1, 2]], pa.array([[1]], pa.list_(pa.uint16())), [[]]])
def test_token_ids_are_lists_of_integers(tmp_path: Path, column: object) -> None:
    check(tmp_path, {"ids": column}, token_ids_column="ids")


@pytest.mark.parametrize("column", [[[1.5]], [3], ["1 2"], [[[1]]]])
def test_and_nothing_else(tmp_path: Path, column: object) -> None:
    with pytest.raises(DataError, match=r"x\.parquet: column ids is .*must be list of integers"):
        check(tmp_path, {"ids": column}, token_ids_column="ids")


def test_list_views_say_what_to_cast_to(tmp_path: Path) -> None:
    offsets, sizes = pa.array([0], pa.int32()), pa.array([1], pa.int32())
    ids = pa.ListViewArray.from_arrays(offsets, sizes, pa.array([5], pa.int32()))
    with pytest.raises(
        DataError, match=r"ids is list_view.* a plain list; cast it to list<item: i"
    ):
        check(tmp_path, {"ids": ids}, token_ids_column="ids")
    message = pa.array([{"role": "user", "content": "hi"}], MESSAGE)
    large = offsets.cast(pa.int64()), sizes.cast(pa.int64())
    messages = pa.LargeListViewArray.from_arrays(*large, message)
    with pytest.raises(
        DataError, match=r"messages is large_list_view.*cast it to list<item: struc"
    ):
        check(tmp_path, {"messages": messages})


@pytest.mark.parametrize(
    "column",
    [
        ['{"n": 1}'],
        [{"max_new_tokens": 3, "stop": ["x"]}],
        pa.nulls(1),
        pa.array([[("n", 1)]], pa.map_(pa.string(), pa.int64())),
    ],
    ids=["json", "struct", "null", "map"],
)
def test_sampling_params_are_structs_or_json(tmp_path: Path, column: object) -> None:
    check(tmp_path, {"prompt": ["a"], "sampling_params": column})


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1], "column sampling_params is int64; it must be struct, or string"),
        ([{"tmperature": 1.0}], "unknown field tmperature; did you mean temperature?"),
        ([{"zork": 1.0}], "unknown field zork; known: max_tokens, n,"),
    ],
)
def test_other_sampling_params_are_refused(
    tmp_path: Path, column: list[object], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        check(tmp_path, {"prompt": ["a"], "sampling_params": column})
    assert message in str(caught.value)
    assert "x.parquet" in str(caught.value)


def test_conversations_need_a_chat_template(tmp_path: Path) -> None:
    columns = {"messages": pa.array([[]], pa.list_(MESSAGE))}
    with pytest.raises(UsageError, match="chat_template is none, but column messages holds conv"):
        check(tmp_path, columns, chat_template="none")


def test_a_template_reads_columns_of_any_type(tmp_path: Path) -> None:
    check(tmp_path, {"prompt": [1]}, template="{{ prompt }}")


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ({}, UsageError),
        ({"template": "{{ tex }}"}, UsageError),
        ({"template": "x", "system": "{{ tex }}"}, UsageError),
        ({"column": "tex"}, DataError),
        ({"token_ids_column": "ids"}, DataError),
    ],
)
def test_a_prompt_that_is_not_in_the_data(
    tmp_path: Path, prompt: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="text"):
        check(tmp_path, {"text": ["a"]}, **prompt)


def test_no_model_is_loaded_for_them(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": [1]})
    build = FakeBuild()
    with pytest.raises(DataError, match="column prompt is int64") as caught:
        run_job(job(tmp_path), build=build)
    assert caught.value.exit_code == 4
    assert build.count == 0
