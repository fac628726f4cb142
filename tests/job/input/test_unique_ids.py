from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.errors import DataError
from batchinfer.job.input import unique_ids
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.unique_ids import check_unique_ids
from tests.job.datasets import write_parquet


def check(tmp_path: Path, values: Any, limit: int | None = None) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"id": values})
    check_unique_ids(open_source(str(path), limit), "id")


# Python gives -1 and -2 one hash.
@pytest.mark.parametrize("values", [[-1, -2, 3], ["a", "b", "A"], [1.5, 2.5], []])
def test_different_ids_pass(tmp_path: Path, values: list[object]) -> None:
    check(tmp_path, values)


@pytest.mark.parametrize("values", [["a", "b", "a"], [7, 8, 7]])
def test_a_duplicate_names_the_value_and_its_rows(tmp_path: Path, values: list[object]) -> None:
    with pytest.raises(DataError, match=f"{values[0]} twice, in rows 0 and 2"):
        check(tmp_path, values)


def test_times_are_shown_as_times(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2026-11-20 twice"):
        check(tmp_path, [date(2026, 11, 20)] * 2)
    with pytest.raises(DataError, match="29349-01-26 twice"):
        check(tmp_path, pa.array([10**7] * 2, pa.date32()))


def test_only_the_selected_rows_count(tmp_path: Path) -> None:
    check(tmp_path, ["a", "b", "a"], limit=2)


def test_a_missing_id_names_its_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='row 1 has no "id"'):
        check(tmp_path, ["a", None])


def test_nan_is_no_id(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='row 1 has no "id"'):
        check(tmp_path, [0.5, float("nan"), float("nan")])


def test_a_column_of_lists_cannot_be_the_id(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="list"):
        check(tmp_path, [["a"], ["b"]])


def test_more_ids_than_are_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique_ids, "HASHES_AT_ONCE", 10)
    check(tmp_path, list(range(95)))
    with pytest.raises(DataError, match="94 twice"):
        check(tmp_path, [*range(95), 94])
