from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.errors import DataError
from batchinfer.job.input.dataset import Source, open_source
from batchinfer.job.input.formats.arrow_ipc import check_buffers
from batchinfer.job.input.invalid_utf8 import with_valid_text
from batchinfer.job.output.schema import output_table
from tests.job.datasets import strings
from tests.job.fakes import job

Write = Callable[[pa.Table, Path], None]


def to_file(table: pa.Table, path: Path, rows_per_batch: int = 700) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, rows_per_batch)


def to_stream(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, 700)


def to_feather(table: pa.Table, path: Path) -> None:
    pyarrow.feather.write_feather(table, path, compression="zstd", chunksize=700)


WRITERS = {"arrow": to_file, "arrows": to_stream, "feather": to_feather}
ROWS = 3000


def table() -> pa.Table:
    texts = [None if at % 7 == 0 else f"text {at}" for at in range(ROWS)]
    return pa.table(
        {
            "text": texts,
            "n": pa.array(range(ROWS), pa.int32()),
            "kind": pa.array([f"k{at % 3}" for at in range(ROWS)]).dictionary_encode(),
            "view": pa.array(texts).cast(pa.string_view()),
            "talk": [[{"role": "user", "content": f"hi {at}"}] for at in range(ROWS)],
        }
    )


def kept(found: Source, columns: list[str], ranges: list[range]) -> list[dict[str, Any]]:
    return [row for _, batch in found.scan(columns, ranges) for row in batch.to_pylist()]


@pytest.mark.parametrize("name", WRITERS)
def test_any_ranges_and_columns_are_read(tmp_path: Path, name: str) -> None:
    path, rows = tmp_path / f"x.{name}", table()
    WRITERS[name](rows, path)
    found = open_source(str(path))
    assert (found.num_rows, found.schema) == (ROWS, rows.schema)
    ranges = [range(5), range(690, 710), range(1300, 2700), range(2999, 3000)]
    columns = ["kind", "n", "text", "view", "talk"]
    expected = rows.select(columns).to_pylist()
    assert kept(found, columns, ranges) == [expected[at] for chosen in ranges for at in chosen]
    sizes = [len(batch) for _, batch in found.scan(["n"], [range(ROWS)])]
    assert max(sizes) <= 1024
    [(first, piece)] = found.rows(["talk", "text"], [range(699, 700)])
    assert (first, piece[0]["text"]) == (699, b"text 699")  # type: ignore[index]


def test_files_and_streams_are_one_dataset(tmp_path: Path) -> None:
    to_file(table().select(["n"]), tmp_path / "a.arrow")
    to_stream(table().select(["n", "text"]), tmp_path / "b.arrows")
    found = open_source(str(tmp_path), mode="union", condition="n < 2")
    assert kept(found, ["text"], [found.rows_there]) == [
        {"text": t} for t in (None, None, None, "text 1")
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"FEA1" + data, "is Feather version 1"),
        (lambda data: b"a,b\n1,2\n", "cannot be read as Arrow IPC"),
        (lambda data: data[: len(data) // 2], "cannot be read as Arrow IPC"),
        (lambda data: data[:-10], "cannot be read as Arrow IPC"),
    ],
)
def test_a_file_that_is_not_arrow_is_refused(tmp_path: Path, damage: Any, message: str) -> None:
    path = tmp_path / "x.arrow"
    to_file(table(), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=rf"x\.arrow {message}"):
        open_source(str(path))


def test_offsets_out_of_range_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    to_file(pa.table({"x": ["aa", "bb", "cc"]}), path)
    data = path.read_bytes()
    offsets = bytes(pa.array([0, 2, 4, 6], pa.int32()).buffers()[1])[:16]
    at = data.index(offsets)
    path.write_bytes(data[: at + 8] + (2**30).to_bytes(4, "little") + data[at + 12 :])
    found = open_source(str(path))
    with pytest.raises(DataError, match=r"x\.arrow: record batch 0 cannot be read"):
        kept(found, ["x"], [range(3)])


def test_invalid_text_is_read_as_bytes(tmp_path: Path) -> None:
    texts = strings([b"a", b"\xff"])
    to_file(
        pa.table({"x": texts, "s": pa.StructArray.from_arrays([texts], ["t"])}),
        tmp_path / "x.arrow",
    )
    found = open_source(str(tmp_path))
    [(_, rows)] = found.rows(["x", "s"], [range(2)])
    assert rows[1] == {"x": b"\xff", "s": {"t": b"\xff"}}


def test_a_type_that_parquet_does_not_hold_cannot_be_kept(tmp_path: Path) -> None:
    odd = pa.RunEndEncodedArray.from_arrays([2], ["a"])
    path = tmp_path / "in" / "x.arrow"
    path.parent.mkdir()
    to_file(pa.table({"prompt": ["a", "b"], "odd": odd}), path)
    found = open_source(str(path))
    with pytest.raises(DataError, match=r'"odd" is run_end_encoded.*\nleave it out of input\.keep'):
        output_table(found, job(tmp_path))
    output_table(found, job(tmp_path, input={"keep_columns": ["prompt"]}))


@given(at=st.integers(0, 4000), value=st.integers(0, 255), stream=st.booleans())
def test_a_damaged_byte_is_read_or_refused(
    tmp_path: Path, at: int, value: int, stream: bool
) -> None:
    path = tmp_path / "x.arrow"
    rows = table().slice(0, 40)
    (to_stream if stream else to_file)(rows, path)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = value
    path.write_bytes(data)
    try:
        found = open_source(str(path))
        for _, batch in found.scan(found.schema.names, [found.rows_there]):
            for column in batch.columns:
                with_valid_text(column)
        for _, piece in found.rows(found.schema.names, [found.rows_there]):
            assert piece
    except DataError:
        pass


LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda kind: pa.list_(kind, 2)]


@pytest.mark.parametrize("make", LISTS)
def test_lists_of_all_kinds_pass_the_check(make: Callable[[pa.DataType], pa.DataType]) -> None:
    texts = strings([b"a", b"\xff", b"c", b"d"])
    for kind in (make(pa.string()), make(pa.struct([("t", pa.string())]))):
        check_buffers(pa.nulls(2, kind))
    check_buffers(pa.array([["a", "b"], None, ["c", "d"]], make(pa.string())).slice(1))
    check_buffers(pa.FixedSizeListArray.from_arrays(texts, 2))
    check_buffers(pa.ListArray.from_arrays([0, 2, 4], texts))
    check_buffers(pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())))


def test_list_offsets_out_of_range_are_found() -> None:
    buffers = [None, pa.py_buffer(pa.array([0, 2, 9, 3], pa.int32()).buffers()[1])]
    lists = pa.Array.from_buffers(pa.list_(pa.int64()), 3, buffers, children=[pa.array([1, 2, 3])])
    with pytest.raises(pa.ArrowInvalid):
        check_buffers(lists)
