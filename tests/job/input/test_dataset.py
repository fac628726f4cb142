from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.errors import DataError, UsageError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.discover import find_files
from batchinfer.job.input.format import BATCH_ROWS
from tests.job.datasets import flip_bit, write_parquet


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write rows x = 0..9 in three files, next to files that are not data."""
    for name, values in (("b", [4, 5, 6]), ("a", [0, 1, 2, 3]), ("sub/c", [7, 8, 9])):
        write_parquet(tmp_path / f"{name}.parquet", {"x": values}, rows_per_group=2)
    for name in ("_SUCCESS", "_meta.parquet", ".hidden.parquet", "notes.txt", "_tmp/d.parquet"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("not data")
    return tmp_path


def values(path: str | list[str], ranges: list[range], limit: int | None = None) -> list[int]:
    batches = open_source(path, limit).scan(["x"], ranges)
    return [x for _, batch in batches for x in batch.column("x").to_pylist()]


def test_a_directory_is_read_in_path_order_without_hidden_files(folder: Path) -> None:
    assert values(str(folder), [range(10)]) == list(range(10))


def test_input_path_accepts_globs_files_and_lists(folder: Path) -> None:
    found = [Path(file).name for file in find_files(f"{folder}/*.parquet")]
    assert found == ["a.parquet", "b.parquet"]
    assert values([str(folder / "b.parquet"), str(folder / "sub")], [range(6)]) == [*range(4, 10)]


@pytest.mark.parametrize("pattern", ["**/*.parquet", "**", "*", "*/*.parquet", "[_.a-z]*"])
def test_a_glob_finds_nothing_hidden(folder: Path, pattern: str) -> None:
    found = map(Path, find_files(f"{folder}/{pattern}"))
    names = {file.name for file in found if file.suffix == ".parquet"}
    assert names
    assert names <= {"a.parquet", "b.parquet", "c.parquet"}


@pytest.mark.parametrize("pattern", ["_tmp/*.parquet", "**/_tmp/*.parquet", "_t*/*", "_tmp/**"])
def test_a_glob_finds_hidden_files_if_it_names_the_dot(folder: Path, pattern: str) -> None:
    (folder / "_tmp" / "_meta.parquet").write_text("not data")
    found = [Path(file).name for file in find_files(f"{folder}/{pattern}")]
    assert found == ["d.parquet"]


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.parquet")
    for entry in (tmp_path / "pipe.parquet", tmp_path, "/dev/null"):
        with pytest.raises(DataError, match=r"is a pipe, a socket or a device|is not a file"):
            open_source(str(entry))


def test_a_file_named_twice_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.parquet 2 times"):
        find_files([str(folder / "a.parquet"), str(folder / "*.parquet")])


@pytest.mark.parametrize("entry", ["gone.parquet", "none-*.parquet", "empty"])
def test_input_path_without_files_is_an_error(tmp_path: Path, entry: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=entry.replace("*", r"\*")):
        open_source(str(tmp_path / entry))


def test_a_name_too_long_for_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"input\.path: .*nnn\.\.\.: File name too long"):
        open_source(str(tmp_path / ("n" * 5000)))


@given(cuts=st.sets(st.integers(0, 10)))
def test_ranges_are_read_exactly(folder: Path, cuts: set[int]) -> None:
    ends = sorted(cuts)
    ranges = [range(a, b) for a, b in zip(ends[::2], ends[1::2], strict=False)]
    batches = list(open_source(str(folder)).scan(["x"], ranges))
    read = [x for _, batch in batches for x in batch.column(0).to_pylist()]
    assert read == [x for rows in ranges for x in rows]
    for first_row, batch in batches:
        assert any(first_row in rows and first_row + len(batch) <= rows.stop for rows in ranges)
        assert batch.column(0)[0].as_py() == first_row


def test_limit_and_batches_are_bounded(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"x": range(5000)}, rows_per_group=4000)
    assert open_source(str(path), limit=10).num_rows == 10
    assert open_source(str(path), limit=10_000).num_rows == 5000
    sizes = [len(batch) for _, batch in open_source(str(path)).scan(["x"], [range(5000)])]
    assert sum(sizes) == 5000
    assert max(sizes) <= BATCH_ROWS


def test_columns_come_in_the_order_asked_for(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"a": [1], "b": [2], "b.c": [3]})
    _, batch = next(open_source(str(path)).scan(["b", "a"], [range(1)]))
    assert batch.to_pydict() == {"b": [2], "a": [1]}


def test_a_column_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError, match='more than one column named "x"'):
        open_source(str(tmp_path))


def test_a_flipped_bit_in_a_page_names_file_and_row_group(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"x": range(300)}, rows_per_group=100)
    next_group = pq.ParquetFile(path).metadata.row_group(2).column(0).dictionary_page_offset
    flip_bit(path, next_group - 5)
    source = open_source(str(path))
    read = source.scan(["x"], [range(300)])
    assert next(read)[0] == 0
    with pytest.raises(DataError, match=r"x\.parquet: row group 1 cannot be read"):
        list(read)


def test_file_that_changes_after_planning_is_refused(folder: Path) -> None:
    source = open_source(str(folder))
    write_parquet(folder / "b.parquet", {"y": [1]})
    with pytest.raises(DataError, match=r"b\.parquet was changed while the job was running"):
        list(source.scan(["x"], [range(10)]))
