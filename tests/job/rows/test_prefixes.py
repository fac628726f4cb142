from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.job.rows.token_store import TokenStore
from batchinfer.job.rows.window import common_with_next, most_in_common, prefix_order

Rows = list[list[int]]

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12)


def store_of(rows: Rows) -> TokenStore:
    store = TokenStore(None)
    store.add([np.array(row, dtype=np.int32) for row in rows])
    return store


def in_common(left: list[int], right: list[int]) -> int:
    return sum(accumulate((a == b for a, b in zip(left, right, strict=False)), min))


@settings(max_examples=50, deadline=None)
@given(ROWS)
def test_rows_are_sorted_and_equal_ones_stay_in_order(rows: Rows) -> None:
    order = prefix_order(store_of(rows).as_arrow())
    assert order == sorted(range(len(rows)), key=lambda at: rows[at])


@settings(max_examples=50, deadline=None)
@given(rows=ROWS, data=st.data())
def test_what_rows_have_in_common_with_those_after_and_before_them(
    rows: Rows, data: st.DataObject
) -> None:
    run = data.draw(st.permutations(range(len(rows))))
    store = store_of(rows)
    order = prefix_order(store.as_arrow())
    with_next = common_with_next(store.rows(), order)
    after = most_in_common(order, with_next, run)
    before = most_in_common(order, with_next, run[::-1])
    for at, row in enumerate(run):
        to_come = [in_common(rows[row], rows[other]) for other in run[at + 1 :]]
        gone = [in_common(rows[row], rows[other]) for other in run[:at]]
        assert after[row] == max(to_come, default=0)
        assert before[row] == max(gone, default=0)
    prefixes = {tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)}
    assert sum(len(rows[row]) - before[row] for row in run) == len(prefixes)
