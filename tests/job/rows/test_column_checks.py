"""A job refuses columns whose types it cannot turn into requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.config import PromptConfig
from batchinfer.errors import DataError, UsageError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.rows.column_checks import check_prompt_columns
from tests.job.datasets import write_parquet

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
TEXT = pa.array(["a"])


def check(tmp_path: Path, columns: dict[str, Any], **prompt: Any) -> None:
    path = write_parquet(tmp_path / "x.parquet", columns)
    check_prompt_columns(PromptConfig(**prompt), open_source(str(path)))


@pytest.mark.parametrize(
    ("column", "keys"),
    [
        (TEXT, {}),
        (TEXT.cast(pa.binary()), {}),
        (TEXT.dictionary_encode(), {}),
        (pa.nulls(1), {}),
        (pa.array([[]], pa.list_(MESSAGE)), {}),
        (pa.array([[]], pa.large_list(MESSAGE)), {}),
        ([1], {"template": "{{ x }}"}),
        (pa.array([[1]], pa.list_(pa.uint16())), {"token_ids_column": "x"}),
        ([[]], {"token_ids_column": "x"}),
        (TEXT.dictionary_encode(), {"adapter_column": "x"}),
        (pa.nulls(1), {"adapter_column": "x"}),
    ],
    ids=str,
)
def test_usable_column_types_are_accepted(tmp_path: Path, column: Any, keys: Any) -> None:
    source = {} if "token_ids_column" in keys or "template" in keys else {"column": "x"}
    check(tmp_path, {"x": column}, **source, **keys)


@pytest.mark.parametrize(
    ("column", "kind"),
    [([1], "int64"), ([1.5], "double"), ([True], "bool"), ([["a"]], "list<"), ([{"a": 1}], "stru")],
)
def test_prompts_of_another_type_are_refused(
    tmp_path: Path, column: list[object], kind: str
) -> None:
    wanted = r"it must be string or list<struct<role, content>>"
    with pytest.raises(DataError, match=rf"x\.parquet: column prompt is {kind}.*; {wanted}"):
        check(tmp_path, {"prompt": column})


def test_adapter_columns_of_another_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompt.adapter_column: .*column a is int64; .* string"):
        check(tmp_path, {"prompt": TEXT, "a": [1]}, adapter_column="a")
    with pytest.raises(DataError, match=r'adapter_column: the data has no column "b"'):
        check(tmp_path, {"prompt": TEXT}, adapter_column="b")


@pytest.mark.parametrize("column", [[[1.5]], [3], ["1 2"], [[[1]]]])
def test_token_ids_must_be_lists_of_integers(tmp_path: Path, column: object) -> None:
    with pytest.raises(DataError, match=r"x\.parquet: column ids is .*must be list of integers"):
        check(tmp_path, {"ids": column}, token_ids_column="ids")


def test_list_views_are_refused_with_the_type_to_cast_to(tmp_path: Path) -> None:
    offsets, sizes = pa.array([0], pa.int64()), pa.array([1], pa.int64())
    message = pa.array([{"role": "user", "content": "hi"}], MESSAGE)
    messages = pa.LargeListViewArray.from_arrays(offsets, sizes, message)
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
        ([1], "column sampling_params is int64; it must be struct or string"),
        ([{"zork": 1.0}], "unknown field zork; known: max_tokens, n,"),
    ],
)
def test_invalid_sampling_params_columns_are_refused(
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
