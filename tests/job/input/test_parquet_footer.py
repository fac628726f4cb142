"""Contradictions within a Parquet footer, which states some facts twice."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError
from batchinfer.job.input.arrow_types import check_indices
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.parquet import check_footer, compressed_bytes
from tests.job.datasets import write_parquet

TABLE = pa.table(
    {
        "text": ["a", None],
        "messages": pa.array(
            [[{"role": "user", "content": "x"}], []],
            pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
        ),
        "nested": [{"a": {"b": [1.5, 2.5]}, "c": True}, None],
        "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int32())),
        **{f"column {i}": [i, i] for i in range(20)},
    }
)


def footer_of(data: bytes) -> bytes:
    length = int.from_bytes(data[-8:-4], "little")
    return data[-8 - length : -8]


def by_pyarrow(table: pa.Table) -> bytes:
    file = BytesIO()
    pq.write_table(table, file, row_group_size=1)
    return file.getvalue()


def by_polars(table: pa.Table) -> bytes:
    file = BytesIO()
    polars.from_arrow(table.drop_columns(["map"])).write_parquet(file)  # type: ignore[union-attr]
    return file.getvalue()


@pytest.mark.parametrize("write", [by_pyarrow, by_polars])
@pytest.mark.parametrize("table", [TABLE, TABLE.slice(0, 0), pa.table({"x": pa.nulls(2)})])
def test_footers_of_intact_files_pass(write: Callable[[pa.Table], bytes], table: pa.Table) -> None:
    if write is by_polars and "map" not in table.schema.names:
        table = table.append_column("map", pa.nulls(len(table)))
    check_footer(footer_of(write(table)))


def test_a_footer_of_duckdb_passes(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    duckdb.sql(f"COPY (SELECT 1 AS a, [{{'b': 'c'}}] AS d) TO '{path}' (FORMAT parquet)")
    check_footer(footer_of(path.read_bytes()))


@pytest.mark.parametrize("name", [b"text", b"role", b"column 19"])
def test_names_that_differ_within_a_footer_are_refused(name: bytes) -> None:
    footer = footer_of(by_pyarrow(TABLE.slice(0, 1)))
    first = footer.index(name)
    changed = footer[:first] + name.upper() + footer[first + len(name) :]
    with pytest.raises(ValueError, match="do not match its schema"):
        check_footer(changed)


@pytest.mark.parametrize("write", [by_pyarrow, by_polars])
def test_compressed_bytes_equal_those_of_pyarrow(write: Callable[[pa.Table], bytes]) -> None:
    data = write(TABLE)
    metadata = pq.read_metadata(BytesIO(data))
    for columns in (["text"], ["nested", "messages", "column 3"], ["none"], TABLE.column_names):
        expected = sum(
            metadata.row_group(group).column(at).total_compressed_size
            for group in range(metadata.num_row_groups)
            for at in range(metadata.num_columns)
            if metadata.schema.column(at).path.partition(".")[0] in columns
        )
        assert compressed_bytes(footer_of(data), columns) == expected
        assert (expected > 0) == (columns != ["none"])


def test_a_damaged_footer_does_not_crash_the_process() -> None:
    """For some of these footers, pyarrow would crash the process."""
    footer = footer_of(by_pyarrow(TABLE.select(["text", "messages"])))
    refused = 0
    for at in range(len(footer)):
        for flip in (1, 0x80):
            changed = footer[:at] + bytes([footer[at] ^ flip]) + footer[at + 1 :]
            try:
                assert isinstance(compressed_bytes(changed, ["text"]), int)
            except ValueError:
                refused += 1
    assert refused > len(footer) // 10


def test_a_file_whose_second_row_group_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), path, row_group_size=1)
    source = open_source(str(path))
    data = path.read_bytes()
    footer = footer_of(data)
    second = len(data) - 8 - len(footer) + footer.rindex(b"prompt")
    path.write_bytes(data[: second - 1] + b"\x7f" + data[second:])  # wrong length of the name
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as Parquet: its footer"):
        source.format.stored_bytes(source.files[0], ["prompt"])
    assert source.format.stored_bytes(source.files[0], []) == 0


def test_a_truncated_footer_is_refused() -> None:
    footer = footer_of(by_pyarrow(TABLE.select(["text", "messages"]).slice(0, 1)))
    group = footer.index(b"content", footer.index(b"content") + 1)
    for length in range(0, group, 7):
        if length:
            with pytest.raises(ValueError, match="damaged"):
                check_footer(footer[:length])


def test_a_file_whose_footer_disagrees_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"prompt": ["a"]})
    data = path.read_bytes()
    at = data.index(b"prompt", len(data) - 8 - len(footer_of(data)))
    path.write_bytes(data[:at] + b"PROMPT" + data[at + 6 :])
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as Parquet: its footer"):
        open_source(str(path))


def test_a_value_outside_its_dictionary_is_found() -> None:
    words = pa.array(["a", "b"])
    for indices in ([0, 2], [-1, 0]):
        column = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), words, safe=False)
        structs = pa.StructArray.from_arrays([column], ["role"])
        ends = pa.array([0, 2], pa.int32())
        for array in (
            column,
            structs,
            pa.ListArray.from_arrays(ends, column),
            pa.ListArray.from_arrays(ends, structs),
            pa.FixedSizeListArray.from_arrays(column, 2),
            pa.ListViewArray.from_arrays(
                pa.array([0], pa.int32()), pa.array([2], pa.int32()), column
            ),
            pa.MapArray.from_arrays(ends, words, column),
        ):
            with pytest.raises(OSError, match="not in the column's dictionary"):
                check_indices(array)
    check_indices(pa.DictionaryArray.from_arrays(pa.array([None, 1, 0]), words))
    check_indices(pa.DictionaryArray.from_arrays(pa.array([None], pa.int32()), words))
