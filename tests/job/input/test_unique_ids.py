from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.errors import DataError, RowError
from batchinfer.job.input import unique_ids
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.unique_ids import NO_ID, check_unique_ids, find_bad_ids
from tests.job.datasets import strings, write_parquet


def bad(tmp_path: Path, values: Any, limit: int | None = None, **columns: Any) -> dict[int, int]:
    """Return the rows with a bad id, and for each the first row with the same id."""
    path = write_parquet(tmp_path / "x.parquet", {"id": values, **columns})
    condition = "keep" if columns else None
    found = find_bad_ids(open_source(str(path), limit, condition=condition), "id")
    return dict(zip(found.rows.tolist(), found.firsts.tolist(), strict=True))


# Python's hash of -1 equals its hash of -2.
@pytest.mark.parametrize("values", [[-1, -2, 3], ["a", "b", "A"], [1.5, 2.5], []])
def test_different_ids_are_not_errors(tmp_path: Path, values: list[object]) -> None:
    assert bad(tmp_path, values) == {}


@pytest.mark.parametrize("values", [["a", "b", "a", "a"], [7, 8, 7, 7], [date(2026, 1, 1)] * 4])
def test_repeated_ids_name_the_first_row(tmp_path: Path, values: list[object]) -> None:
    assert bad(tmp_path, values).items() >= {2: 0, 3: 0}.items()


def test_a_time_before_the_year_1_is_an_id(tmp_path: Path) -> None:
    assert bad(tmp_path, pa.array([10**7, 10**7 + 1, 10**7], pa.date32())) == {2: 0}


def test_ids_that_differ_only_in_invalid_bytes_are_equal_in_the_output(tmp_path: Path) -> None:
    ids = strings([b"caf\xe9", b"caf", b"caf\xe8", "caf\ufffd".encode()])
    assert bad(tmp_path, ids) == {2: 0, 3: 0}


def test_null_and_nan_are_not_ids(tmp_path: Path) -> None:
    nan = float("nan")
    assert bad(tmp_path, [0.5, nan, None, nan]) == {1: NO_ID, 2: NO_ID, 3: NO_ID}


def test_only_selected_rows_are_compared(tmp_path: Path) -> None:
    assert bad(tmp_path, ["a", "b", "a"], limit=2) == {}
    assert bad(tmp_path, ["a", "a", None, "a"], keep=[False, True, False, True]) == {3: 1}


def test_a_column_of_lists_cannot_be_the_id(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="list"):
        bad(tmp_path, [["a"], ["b"]])


def test_a_check_names_the_first_bad_row(tmp_path: Path) -> None:
    for values, message in (
        ([1, 2, 1], "row 2: .*row 0 has the same"),
        ([1, None], "row 1: .*no "),
    ):
        path = write_parquet(tmp_path / "x.parquet", {"id": values})
        with pytest.raises(DataError, match=message):
            check_unique_ids(open_source(str(path)), "id")


def test_bad_ids_replace_rows_with_errors(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": 1}\n{"id": 1}\nno JSON\n{}\n{"id": 2}\n')
    source = open_source(str(path))
    found = find_bad_ids(source, "id")
    [(_, rows)] = map(found.mark, source.rows(["id"], [range(5)]))
    codes = [row.code if isinstance(row, RowError) else row["id"] for row in rows]
    assert codes == [1, "duplicate_id", "invalid_json", "missing_id", 2]


@given(
    values=st.lists(st.none() | st.integers(-2, 9), max_size=40),
    at_once=st.sampled_from([1, 3, 1 << 24]),
    first=st.integers(0, 40),
)
def test_bad_ids_equal_those_of_a_simple_loop(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: list[int | None],
    at_once: int,
    first: int,
) -> None:
    monkeypatch.setattr(unique_ids, "HASHES_AT_ONCE", at_once)
    expected: dict[int, int] = {}
    rows: dict[int, int] = {}
    for row, value in enumerate(values):
        if value is None:
            expected[row] = NO_ID
        elif rows.setdefault(value, row) != row:
            expected[row] = rows[value]
    path = write_parquet(tmp_path / "x.parquet", {"id": pa.array(values, pa.int64())})
    source = open_source(str(path))
    found = find_bad_ids(source, "id")
    assert dict(zip(found.rows.tolist(), found.firsts.tolist(), strict=True)) == expected
    for _, marked in map(found.mark, source.rows(["id"], [range(first, len(values))])):
        wrong = [first + at for at, row in enumerate(marked) if isinstance(row, RowError)]
        assert wrong == sorted(row for row in expected if row >= first)
