from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.job.manifest import Manifest
from batchinfer.job.row_ranges import (
    in_range,
    missing_ranges,
    ranges_in,
    ranges_of,
    sorted_row_ids,
    within,
)

PARTS = Manifest("f", {}, (), (), 25, 10, "2026-11-20T10:00:00").parts()
SOME_ROWS = st.sets(st.integers(0, 24))


@given(rows=SOME_ROWS)
def test_ranges_of_returns_maximal_ranges(rows: set[int]) -> None:
    ranges = ranges_of(sorted_row_ids(rows))
    assert [row for r in ranges for row in r] == sorted(rows)
    assert all(first.stop < second.start for first, second in pairwise(ranges))


@given(rows=SOME_ROWS)
def test_missing_ranges_complement_finished_rows(rows: set[int]) -> None:
    there = sorted_row_ids(rows)
    missing = missing_ranges(PARTS, there)
    assert {row for r in missing for row in r} == set(range(25)) - rows
    for r in (*missing, *ranges_in(PARTS, there)):
        assert any(r.start in part.rows and r[-1] in part.rows for part in PARTS)
    assert [row for part in PARTS for row in in_range(there, part.rows)] == sorted(rows)


@given(rows=SOME_ROWS, others=SOME_ROWS)
def test_within_keeps_row_ids_in_ranges(rows: set[int], others: set[int]) -> None:
    found = within(sorted_row_ids(rows), ranges_of(sorted_row_ids(others)))
    assert found.tolist() == sorted(rows & others)
