from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.job.rows.row_order import most_in_common

Rows = list[list[int]]

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12)


def in_common(left: list[int], right: list[int]) -> int:
    return sum(accumulate((a == b for a, b in zip(left, right, strict=False)), min))


@given(rows=ROWS, data=st.data())
def test_shared_prefixes_equal_those_of_a_simple_loop(rows: Rows, data: st.DataObject) -> None:
    run = data.draw(st.permutations(range(len(rows))))
    order = sorted(range(len(rows)), key=lambda at: rows[at])
    with_next = [in_common(rows[row], rows[other]) for row, other in pairwise(order)] + [0]
    after = most_in_common(order, with_next, run)
    before = most_in_common(order, with_next, run[::-1])
    for at, row in enumerate(run):
        to_come = [in_common(rows[row], rows[other]) for other in run[at + 1 :]]
        gone = [in_common(rows[row], rows[other]) for other in run[:at]]
        assert after[row] == max(to_come, default=0)
        assert before[row] == max(gone, default=0)
    prefixes = {tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)}
    assert sum(len(rows[row]) - before[row] for row in run) == len(prefixes)
