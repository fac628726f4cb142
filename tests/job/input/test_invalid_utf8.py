from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.errors import RowError
from batchinfer.job.input import invalid_utf8
from batchinfer.job.input.invalid_utf8 import is_valid_text, python_rows, with_valid_text
from batchinfer.text.row_values import decoded
from tests.job.datasets import strings

INVALID = b"caf\xe9"
REPLACED = "caf\N{REPLACEMENT CHARACTER}"

TEXT = strings([b"ok", INVALID, None])
NESTED = {
    "large_string": TEXT.cast(pa.binary()).cast(pa.large_binary()).view(pa.large_string()),
    "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int32()), TEXT),
    "list": pa.ListArray.from_arrays(pa.array([0, 1, 2, 2], pa.int32()), TEXT),
    "struct": pa.StructArray.from_arrays([TEXT, pa.array([1, 2, 3])], ["role", "n"]),
    "map": pa.MapArray.from_arrays([0, 1, 2, 2], TEXT.slice(0, 2), pa.array([1, 2])),
}


def test_text_arrives_as_bytes_and_the_rest_as_python_values() -> None:
    messages = pa.array([[{"role": "user", "content": "hi"}], None, []])
    columns = [TEXT, pa.array([1, 2, None]), messages, NESTED["dictionary"]]
    rows = python_rows(pa.record_batch(columns, names=["text", "n", "messages", "label"]))
    assert rows == [
        {"text": b"ok", "n": 1, "messages": [{"role": b"user", "content": b"hi"}], "label": b"ok"},
        {"text": INVALID, "n": 2, "messages": None, "label": INVALID},
        {"text": None, "n": None, "messages": [], "label": None},
    ]


@pytest.mark.parametrize("kind", ["large_string", "list", "map"])
def test_only_the_rows_of_a_slice_are_checked(kind: str) -> None:
    assert [is_valid_text(NESTED[kind].slice(row, 1)) for row in range(3)] == [True, False, True]


def test_rows_without_columns_are_rows() -> None:
    batch = pa.record_batch([pa.array([1, 2])], names=["x"]).select([])
    assert python_rows(batch) == [{}, {}]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.timestamp("ns", "UTC"), datetime.datetime(1970, 1, 1, 0, 0, 0, 1, datetime.UTC)),
        (pa.time64("ns"), datetime.time(microsecond=1)),
        (pa.duration("ns"), datetime.timedelta(microseconds=1)),
    ],
)
def test_nested_nanoseconds_become_python_times(kind: pa.DataType, expected: object) -> None:
    struct = pa.array([{"t": [1_500]}, None], pa.struct([("t", pa.list_(kind))]))
    rows = python_rows(pa.record_batch([struct], ["s"]))
    assert rows == [{"s": {"t": [expected]}}, {"s": None}]


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (pa.date32(), 10**7),
        (pa.date64(), 864 * 10**12),
        (pa.timestamp("s"), 10**15),
        (pa.timestamp("us", "UTC"), -(2**63)),
        (pa.timestamp("us", "No/Where"), 0),
        (pa.duration("s"), 10**17),
    ],
    ids=str,
)
def test_a_time_that_python_cannot_hold_fails_only_its_row(kind: Any, number: int) -> None:
    values = pa.array([{"t": None}, {"t": number}], pa.struct([("t", kind)]))
    first, second = python_rows(pa.record_batch([values], ["when"]))
    assert first == {"when": {"t": None}}
    error = second["when"]
    assert isinstance(error, RowError)
    assert error.code == "template_error"
    assert "column when holds a time that cannot be read" in error.message


@pytest.mark.parametrize("kind", list(NESTED))
def test_nested_invalid_text_is_replaced(kind: str) -> None:
    replaced = with_valid_text(NESTED[kind])
    replaced.validate(full=True)
    assert replaced.type == NESTED[kind].type
    assert len(replaced) == 3
    assert REPLACED in repr(replaced.to_pylist())


def test_replacing_invalid_text_keeps_nanoseconds() -> None:
    times = pa.array([1_500, 2_001, None], pa.timestamp("ns"))
    replaced = with_valid_text(pa.StructArray.from_arrays([TEXT, times], ["role", "t"]))
    assert replaced.field("t").equals(times)
    assert replaced.field("role").to_pylist() == ["ok", REPLACED, None]


def test_a_text_that_is_too_large_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invalid_utf8, "_MOST_BYTES", 8)
    texts = ["x" * 9, "x" * 8, None, "", "x" * 1000]
    for kind in (pa.string(), pa.large_binary(), pa.dictionary(pa.int8(), pa.string())):
        batch = pa.record_batch({"a": pa.array(texts, kind), "b": [[text] for text in texts]})
        rows = python_rows(batch)
        found = [getattr(row["a"], "code", row["a"]) for row in rows]
        assert found == ["row_too_large", b"x" * 8, None, b"", "row_too_large"]
        assert rows[0]["b"] == [b"x" * 9], "lists are unchanged"


def test_the_limit_of_a_text_is_the_same_for_python_and_arrow() -> None:
    large = b"x" * (invalid_utf8._MOST_BYTES + 4)

    (row,) = python_rows(pa.record_batch({"a": pa.array([large])}))

    with pytest.raises(RowError) as caught:
        decoded(large, "a")
    assert (row["a"].code, row["a"].message) == (caught.value.code, caught.value.message)
