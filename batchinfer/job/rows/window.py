"""The order rows run in, a window at a time, and what each shares with others of its window.

Rows are planned a window at a time, always whole parts, so that the parts of one window are all
finished before much of the next has run. By prefix, rows that begin alike run side by side, after
all of another adapter's, which share nothing with them; in input order they run as they come.
Either way each row is told what a later one of its window begins with as well.

Nothing of a window could run before all of it is read. So when the engine has nothing left to
take, it gets a head start: in input order all rows read so far, by prefix the lowest sixteenth of
the new ones. Longest first is the order of models that share no prefixes: nothing is told of any.
The rest of the window then begins at the lowest again, with the prefixes that these
have left in the pool: a head start shares what the rest does as far as the pool still holds it.

What rows have in common: their token ids are sorted. Of two rows, the longest common prefix (LCP)
is then the least of the LCPs of neighbours between them (Manber & Myers 1990, on suffix arrays), so
a row has most in common with the nearest of those that count on either side. Which are nearest is
kept in a linked list that rows leave one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.engine.kv.prefix_index import common_tokens
from batchinfer.errors import DataError, RowError
from batchinfer.job.input.format import BATCH_ROWS
from batchinfer.job.row_ids import Part
from batchinfer.job.rows.token_store import Key, TokenStore, token_ids
from batchinfer.requests import PromptRow

_WARM_UP = 1 / 16
"""Share of the rows read, by prefix: enough to keep an engine busy, few enough that what they
share is still in the pool when the rest of the window comes."""
_NO_TOKENS = np.empty(0, dtype=np.int32)


def prefix_order(keys: pa.ChunkedArray) -> list[int]:
    """Indices that sort binary ``keys``; equal ones stay in order. Other threads run meanwhile."""
    order: list[int] = pc.sort_indices(keys).to_pylist()
    return order


def common_with_next(keys: Sequence[Key], order: Sequence[int]) -> list[int]:
    """Tokens that each row, in ``order``, begins with as the next does; 0 for the last."""
    common = [
        common_tokens(key.tobytes(), following.tobytes())
        for key, following in pairwise(keys[row] for row in order)
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
        previous, following = before[at], after[at]
        longest[row] = max(common[previous], common[at])
        common[previous] = min(common[previous], common[at])
        after[previous], before[following] = following, previous
    return longest


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows that may run now, in the order they should, and their token ids, perhaps on disk."""

    rows: Sequence[PromptRow]
    """Without token ids."""
    keys: Sequence[Key]

    def with_token_ids(self) -> list[PromptRow]:
        """The rows, their token ids read back."""
        return [
            row.with_token_ids(token_ids(key))
            for row, key in zip(self.rows, self.keys, strict=True)
        ]


def plan_windows(
    batches: Iterator[list[PromptRow]],
    parts: Sequence[Part],
    window_rows: int,
    *,
    by_prefix: bool,
    by_length: bool = False,
    make_store: Callable[[], TokenStore],
    is_starved: Callable[[], bool] = lambda: False,
) -> Iterator[RowBatch]:
    """Plan the rows of ``parts``.

    Args:
        batches: the rows in input order, each batch of one part.
        parts: the parts they belong to, in order.
        window_rows: rows are planned among about so many.
        by_prefix: reorder them by their token ids.
        by_length: reorder them by their lengths, the longest first; nothing is shared.
        make_store: makes a window's place for token ids.
        is_starved: whether all rows handed over are taken and more could run.

    Raises:
        StorageError: token ids cannot be kept.
        DataError: what ``batches`` raises, after all rows before it.
    """
    per_window = max(1, window_rows // max(1, parts[0].num_rows))
    window_starts = [part.rows.start for part in parts[::per_window]]
    for _, of_window in groupby(batches, key=lambda r: bisect_right(window_starts, r[0].row_id)):
        window = _Window(by_prefix, by_length, make_store())
        try:
            for batch in of_window:
                window.add(batch)
                if window.has_grown and is_starved():
                    yield from window.warm_up()
        except DataError:  # the rows before the place that cannot be read are not lost with it
            yield from window.rest()
            raise
        yield from window.rest()


class _Window:
    """Rows that are planned together."""

    def __init__(self, by_prefix: bool, by_length: bool, store: TokenStore) -> None:
        self._by_prefix = by_prefix
        self._by_length = by_length
        self._store = store
        self._rows: list[PromptRow] = []
        self._handed_over: list[int] = []
        """Indices of rows, in order."""
        self._num_planned = 0

    def add(self, batch: list[PromptRow]) -> None:
        """Append rows, their token ids to the store."""
        self._store.add(
            [_NO_TOKENS if isinstance(r.prompt, RowError) else r.prompt.token_ids for r in batch]
        )
        self._rows += [row.with_token_ids(_NO_TOKENS) for row in batch]

    @property
    def has_grown(self) -> bool:
        """Whether rows have doubled since they were planned: then planning again is cheap."""
        return len(self._rows) >= max(BATCH_ROWS, 2 * self._num_planned)

    def warm_up(self) -> Iterator[RowBatch]:
        """Rows to begin with, before the window is complete."""
        new = len(self._rows) - self._num_planned
        reorders = self._by_prefix or self._by_length
        return self._hand_over(int(new * _WARM_UP) if reorders else new)

    def rest(self) -> Iterator[RowBatch]:
        """The rows that are not handed over yet."""
        return self._hand_over(len(self._rows) - len(self._handed_over))

    def _hand_over(self, count: int) -> Iterator[RowBatch]:
        """The next ``count`` rows, planned among all that are there."""
        if self._by_length:
            return self._longest(count)
        return self._sharing(count)

    def _longest(self, count: int) -> Iterator[RowBatch]:
        rows, keys = self._rows, self._store.rows()
        lengths = np.array([len(key) for key in keys], np.int64)
        lengths[self._handed_over] = -1  # they are last, and stay
        to_run = np.argsort(-lengths, kind="stable")[:count].tolist()
        self._handed_over += to_run
        self._num_planned = len(rows)
        for start in range(0, count, BATCH_ROWS):
            batch = to_run[start : start + BATCH_ROWS]
            planned = [
                replace(rows[row], distinct_tokens=rows[row].num_tokens_after + len(keys[row]))
                for row in batch
            ]
            yield RowBatch(planned, [keys[row] for row in batch])

    def _sharing(self, count: int) -> Iterator[RowBatch]:
        rows, keys = self._rows, self._store.rows()
        order = prefix_order(self._store.as_arrow())
        order.sort(key=lambda row: rows[row].adapter)  # it keeps the order of equals
        with_next = [
            common if rows[row].adapter == rows[following].adapter else 0
            for common, (row, following) in zip(
                common_with_next(keys, order), pairwise([*order, *order[-1:]]), strict=True
            )
        ]
        remaining = set(range(len(rows))).difference(self._handed_over)
        to_run = [
            row for row in (order if self._by_prefix else range(len(rows))) if row in remaining
        ]
        run = [*self._handed_over, *to_run]
        later = most_in_common(order, with_next, run)
        earlier = most_in_common(order, with_next, run[::-1])
        self._handed_over += to_run[:count]
        self._num_planned = len(rows)
        for start in range(0, count, BATCH_ROWS):
            batch = to_run[start : min(start + BATCH_ROWS, count)]
            yield RowBatch(
                [
                    replace(
                        rows[row],
                        reused_prefix_len=later[row],
                        distinct_tokens=rows[row].num_tokens_after + len(keys[row]) - earlier[row],
                    )
                    for row in batch
                ],
                [keys[row] for row in batch],
            )
