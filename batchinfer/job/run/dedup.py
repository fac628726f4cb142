"""Deduplicates requests: the engine computes only one of several equal rows.

At temperature 0, and with beam search, rows with the same key (``row_key``) have the same answer.
While a row is in the engine, equal rows follow it: they wait, then take its samples or its error.
The answers of finished rows are not kept, so an equal row that comes later is computed again. Such
late rows are rare in prefix order, which puts equal rows of a window next to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchinfer.engine.request import Completion, RequestStats
from batchinfer.requests.requests import PromptRow

MAX_WAITING = 4096
"""Maximum number of rows that wait for equal rows. Waiting rows take memory, and millions of rows
may be equal. Further equal rows run, which is cheap, because their prompt is cached.
"""


class RequestDeduplicator:
    """Keeps leaders, which run in the engine, and followers, which wait for a leader's answer."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[PromptRow]] = {}
        """Lists of a leader and its followers, in the order of their arrival, keyed by row key."""
        self._by_leader: dict[int, list[PromptRow]] = {}
        """The lists of ``_by_key``, keyed by the leader's row id."""
        self._num_waiting = 0

    def leaders(self, rows: Sequence[PromptRow]) -> list[PromptRow]:
        """Return the rows that must run; the rest of ``rows`` waits for equal rows.

        A leader gets the ``reused_prefix_len`` of its last follower, because followers do not run.
        """
        leaders = [row for row in rows if not self.attach(row)]
        for row in leaders:
            if row.row_id in self._by_leader:
                row.reused_prefix_len = self._by_leader[row.row_id][-1].reused_prefix_len
        return leaders

    def attach(self, row: PromptRow) -> bool:
        """Make a row wait for an equal row in the engine, if any; return True if the row must wait.

        A row that waits must not run. If a row does not wait, later rows may wait for it.
        """
        if row.key is None or row.sampling is None or row.sampling.params.temperature > 0:
            return False
        equal = self._by_key.get(row.key)
        if equal is None:
            self._by_key[row.key] = self._by_leader[row.row_id] = [row]
            return False
        if self._num_waiting >= MAX_WAITING:
            return False
        row.share_token_ids(equal[0])
        equal.append(row)
        self._num_waiting += 1
        return True

    def release(self, row_id: int) -> list[PromptRow]:
        """Return the followers of a finished row, and forget them."""
        if row_id not in self._by_leader:
            return []
        leader, *followers = self._by_leader.pop(row_id)
        assert leader.key is not None
        del self._by_key[leader.key]
        self._num_waiting -= len(followers)
        return followers


def copy_result(row: PromptRow, completions: Sequence[Completion]) -> list[Completion]:
    """Return copies of a leader's completions for its follower ``row``."""
    return [
        replace(
            completion,
            request=replace(completion.request, row_id=row.row_id),
            stats=_without_work(completion.stats),
        )
        for completion in completions
    ]


def _without_work(stats: RequestStats) -> RequestStats:
    """Return a follower's statistics: its leader's times, and a prompt that was fully cached."""
    if not stats.has_run:
        return stats
    return replace(
        stats,
        cached_tokens=stats.prompt_tokens,
        recomputed_tokens=0,
        preemptions=0,
        swap_preemptions=0,
        swapped_blocks=0,
        peak_blocks=0,
        deduplicated=1,
    )
