"""Orders rows window by window, and finds the prefixes that they share.

A window consists of whole parts, with about ``engine.order_window`` rows in total, so that its
parts finish before much of the next window has run. Long prompts end a window earlier, at
``MOST_TOKENS``, because the token ids of a window are held in memory. In prefix order, rows with
equal beginnings run side by side, adapter by adapter. In input order, rows keep the order of the
input. In both orders, each row gets the length of the longest prefix that it shares with a later
row of the window. In prefix order, if the engine cannot share prefixes for this model, the longest
rows run first.

A window is planned once all its rows are read. If the engine runs out of rows earlier, the engine
gets a head start: some rows of the unfinished window. In input order, the head start consists of
all rows read so far; in prefix order, of the first sixteenth of the new rows. The rest of the
window then begins with the prefixes that sort first, which are still in the KV cache.

Shared prefixes are found by sorting token ids. The longest common prefix (LCP) of two sorted rows
is the minimum of the LCPs of the neighbors between them (Manber & Myers 1990, on suffix arrays).
Among the rows that have not run, a row therefore shares its longest prefix with one of its two
neighbors in sorted order. A linked list holds the rows that have not run. Indices of rows and
lengths of prefixes are in arrays of 4 bytes per entry, because a list also needs an object for each
number.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import merge

import numpy as np

from batchinfer.engine.kv.prefix_index import common_tokens
from batchinfer.errors import DataError, RowError
from batchinfer.job.input.format import BATCH_ROWS
from batchinfer.job.row_ranges import Part
from batchinfer.requests.branch_points import BranchPoints, plan_branch_points
from batchinfer.requests.requests import PromptRow

MOST_TOKENS = 1 << 26
"""Maximum number of prompt tokens in a window: 256 MiB of ids."""
MOST_IMAGE_BYTES = 1 << 30
"""Maximum number of bytes of encoded images in a window."""
_WARM_UP = 1 / 16
"""Share of the newly read rows that a head start contains in prefix order: enough to keep an engine
busy, but so few that their prefixes are still in the KV cache when the rest of the window runs.
"""
_ADAPTER_BYTES = 4


def plan_windows(
    batches: Iterator[list[PromptRow]],
    parts: Sequence[Part],
    window_rows: int,
    *,
    by_prefix: bool,
    by_length: bool = False,
    with_branch_points: bool = False,
    is_starved: Callable[[], bool] = lambda: False,
    before_next: Callable[[float], None] = lambda reading_s: None,
) -> Iterator[list[PromptRow]]:
    """Plan the rows of ``parts``; yield whole windows, or the head start and the rest of a window.

    Args:
        batches: the rows in input order, in batches that lie within one part.
        parts: the parts of the rows, in order.
        window_rows: approximate number of rows in a window.
        by_prefix: True to order rows by their token ids.
        by_length: True to order rows by length, the longest first, without shared prefixes.
        with_branch_points: True if the model has recurrent state, which must be kept where shared
            prefixes end.
        is_starved: returns True if the engine has taken all rows and could run more.
        before_next: called before each window except the first, with the seconds that it took to
            read the last window; may wait.

    Raises:
        DataError: ``batches`` raised a DataError. The rows read before the error are yielded first.
    """
    per_window = max(1, window_rows // max(1, parts[0].num_rows))
    window_starts = [part.rows.start for part in parts[::per_window]]
    make = partial(_Window, by_prefix, by_length, with_branch_points)
    window, number, began = make(), 0, time.monotonic()
    try:
        for batch in batches:
            before, number = number, bisect_right(window_starts, batch[0].row_id)
            num_tokens = sum(row.num_tokens for row in batch)
            image_bytes = sum(row.image_bytes for row in batch)
            is_full = (
                window.num_tokens + num_tokens > MOST_TOKENS
                or window.image_bytes + image_bytes > MOST_IMAGE_BYTES
            )
            if window.num_rows and (number != before or is_full):
                reading_s = time.monotonic() - began
                yield from window.rest()
                window = make()
                before_next(reading_s)
                began = time.monotonic()
            window.add(batch, num_tokens, image_bytes)
            if window.has_grown and is_starved():
                yield from window.warm_up()
    except DataError:  # still run the rows that were read before the error
        yield from window.rest()
        raise
    yield from window.rest()


class _Window:
    def __init__(self, by_prefix: bool, by_length: bool, with_branch_points: bool) -> None:
        self._by_prefix = by_prefix
        self._with_branch_points = with_branch_points
        self._by_length = by_length
        self._rows: list[PromptRow] = []
        self._sorted_batches: list[array[int]] = []
        """Indices of the rows of each batch, sorted by ``_sort_key``."""
        self._handed_over = array("i")
        """Indices of the rows that were handed over, in order."""
        self._num_planned = 0
        self.num_tokens = 0
        self.image_bytes = 0

    def add(self, batch: list[PromptRow], num_tokens: int, image_bytes: int) -> None:
        start = len(self._rows)
        self._rows += batch
        self.num_tokens += num_tokens
        self.image_bytes += image_bytes
        if not self._by_length:
            indices = range(start, len(self._rows))
            keys = [_sort_key(row) for row in batch]
            by_key = sorted(indices, key=lambda at: keys[at - start])
            self._sorted_batches.append(array("i", by_key))

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def has_grown(self) -> bool:
        """True if the rows have doubled since the last plan, so planning again costs little."""
        return len(self._rows) >= max(BATCH_ROWS, 2 * self._num_planned)

    def warm_up(self) -> Iterator[list[PromptRow]]:
        """Yield the head start: some rows of the unfinished window."""
        new = len(self._rows) - self._num_planned
        reorders = self._by_prefix or self._by_length
        return self._hand_over(int(new * _WARM_UP) if reorders else new)

    def rest(self) -> Iterator[list[PromptRow]]:
        return self._hand_over(len(self._rows) - len(self._handed_over))

    def _hand_over(self, count: int) -> Iterator[list[PromptRow]]:
        """Yield the next ``count`` rows, if any, planned together with all rows read so far."""
        if count:
            to_run = self._longest(count) if self._by_length else self._sharing(count)
            self._handed_over += to_run
            self._num_planned = len(self._rows)
            yield [self._rows[at] for at in to_run]

    def _longest(self, count: int) -> array[int]:
        lengths = np.array([row.num_prompt_tokens for row in self._rows], np.int64)
        lengths[self._handed_over] = -1  # handed-over rows are sorted last
        to_run = array("i", np.argsort(-lengths, kind="stable")[:count].tolist())
        for at in to_run:
            self._rows[at].distinct_tokens = self._rows[at].num_tokens
        return to_run

    def _sharing(self, count: int) -> array[int]:
        order, with_next = self._sorted()
        done = set(self._handed_over)
        sequence = order if self._by_prefix else range(len(order))
        to_run = array("i", (at for at in sequence if at not in done))
        run = self._handed_over + to_run
        later = most_in_common(order, with_next, run)
        earlier = most_in_common(order, with_next, run[::-1])
        points: dict[int, BranchPoints] = {}
        if self._with_branch_points:
            lengths = [row.num_prompt_tokens for row in self._rows]
            points = plan_branch_points(order, with_next, run, lengths)
        for at in to_run[:count]:
            row = self._rows[at]
            row.branch_points = points.get(at, ())
            row.reused_prefix_len = later[at]
            row.distinct_tokens = row.num_tokens - earlier[at]
        return to_run[:count]

    def _sorted(self) -> tuple[array[int], array[int]]:
        """Return the indices in stable ``_sort_key`` order, and each row's LCP with the next row.

        Merging the sorted batches needs only one key per batch at a time. All keys together would
        take as much memory as the token ids.
        """
        runs = [((_sort_key(self._rows[at]), at) for at in run) for run in self._sorted_batches]
        order, with_previous, previous = array("i"), array("i"), b""
        for key, at in merge(*runs):
            order.append(at)
            with_previous.append(_common_prefix_len(previous, key))
            previous = key
        return order, with_previous[1:] + array("i", [0])


def _sort_key(row: PromptRow) -> bytes:
    """Return a row's adapter and token ids as big-endian bytes, which sort like the numbers."""
    adapter = row.adapter.to_bytes(_ADAPTER_BYTES, "big")
    if isinstance(row.prompt, RowError):
        return adapter
    return adapter + row.prompt.token_ids.astype(">u4").tobytes()


def _common_prefix_len(left: bytes, right: bytes) -> int:
    """Return the number of leading tokens that two sort keys share; 0 for different adapters."""
    if left[:_ADAPTER_BYTES] != right[:_ADAPTER_BYTES]:
        return 0
    return common_tokens(left, right) - 1


def most_in_common(
    order: Sequence[int], with_next: Sequence[int], run: Sequence[int]
) -> array[int]:
    """Return the longest prefix, in tokens, that each row shares with a later row of ``run``.

    With ``run`` reversed, the result is the longest prefix that each row shares with an earlier
    row.

    Args:
        order: all rows, sorted by their token ids.
        with_next: LCP of each row with the next row in ``order``.
        run: the same rows, in the order in which they run.
    """
    place, longest = array("i", order), array("i", order)  # every entry is overwritten
    for at, row in enumerate(order, start=1):
        place[row] = at
    after = array("i", range(1, len(order) + 2))  # places 0 and n + 1 are sentinels
    before = array("i", range(-1, len(order) + 1))
    common = array("i", [0, *with_next])
    for row in run:
        at = place[row]
        previous, following = before[at], after[at]
        longest[row] = max(common[previous], common[at])
        common[previous] = min(common[previous], common[at])
        after[previous], before[following] = following, previous
    return longest
