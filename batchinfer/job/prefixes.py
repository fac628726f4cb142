"""What rows have in common with those that run before and after them.

The rows' token ids are sorted. Of two rows, the longest common prefix (LCP) is then the least of
the LCPs of neighbours between them (Manber & Myers 1990, on suffix arrays), so a row has most in
common with the nearest of those that count on either side. Which are nearest is kept in a linked
list that rows leave one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.engine.kv.prefix_index import common_tokens
from batchinfer.job.token_store import Key


def prefix_order(keys: pa.ChunkedArray) -> list[int]:
    """Indices that sort binary ``keys``; equal ones stay in order. Other threads run meanwhile."""
    order: list[int] = pc.sort_indices(keys).to_pylist()
    return order


def common_with_next(keys: Sequence[Key], order: Sequence[int]) -> list[int]:
    """Tokens that each row, in ``order``, begins with as the next does; 0 for the last."""
    common = [
        common_tokens(left.tobytes(), right.tobytes())
        for left, right in pairwise(keys[row] for row in order)
    ]
    return [*common, 0]


def most_in_common(
    order: Sequence[int], with_next: Sequence[int], run: Sequence[int]
) -> dict[int, int]:
    """Tokens that each row begins with as some row does that comes after it in ``run``.

    Args:
        order: all rows, sorted by their token ids.
        with_next: of each of them, LCP with the next in ``order``.
        run: the same rows, in the order they leave.

    Returns:
        By row. With ``run`` reversed: what each has in common with some row before it.
    """
    place = {row: at for at, row in enumerate(order, start=1)}
    after = list(range(1, len(order) + 2))  # places 0 and n + 1 are those of no row
    before = list(range(-1, len(order) + 1))
    common = [0, *with_next]
    longest = {}
    for row in run:
        at = place[row]
        left, right = before[at], after[at]
        longest[row] = max(common[left], common[at])
        common[left] = min(common[left], common[at])
        after[left], before[right] = right, left
    return longest
