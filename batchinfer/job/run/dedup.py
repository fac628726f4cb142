"""Deduplication of requests: of equal rows that draw nothing, one is computed.

Where nothing is drawn (temperature 0, or beams), rows with one key (``row_key``) have one answer. A
row whose key a row in the engine has follows it: it waits for that one and takes what it comes to,
samples or error. Whoever comes later is computed again, also in the next run: nothing of a row that
is done is kept for others. By prefix, equal rows of a window come one after another, so that this
is rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchinfer.engine.request import Completion, RequestStats
from batchinfer.requests.requests import PromptRow

MAX_WAITING = 4096
"""Rows that wait for others, at most: these are in memory, and millions may be equal. More of them
are run: their prompt is computed already, and the engine never lacks rows for those that wait."""


class RequestDeduplicator:
    """Leaders, which are in the engine, and their followers, which wait for what they come to."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[PromptRow]] = {}
        """Leaders, each with its followers in the order they came."""
        self._by_leader: dict[int, list[PromptRow]] = {}
        """The same by the leader's row id."""
        self._num_waiting = 0

    def leaders(self, rows: Sequence[PromptRow]) -> list[PromptRow]:
        """The rows that must run, of those that come next; the others wait for equal ones.

        Followers do not need their leader's prompt later, as they do not run: whoever comes after
        the last of them does.
        """
        leaders = [row for row in rows if not self.attach(row)]
        for row in leaders:
            if row.row_id in self._by_leader:
                row.reused_prefix_len = self._by_leader[row.row_id][-1].reused_prefix_len
        return leaders

    def attach(self, row: PromptRow) -> bool:
        """Have a row follow an equal one in the engine; else, rows to come may follow it.

        Returns:
            Whether it waits, and so must not run.
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
        """The followers of a row that is done."""
        if row_id not in self._by_leader:
            return []
        leader, *followers = self._by_leader.pop(row_id)
        assert leader.key is not None
        del self._by_key[leader.key]
        self._num_waiting -= len(followers)
        return followers


def copy_result(row: PromptRow, completions: Sequence[Completion]) -> list[Completion]:
    """A leader's completions as those of its follower ``row``."""
    return [
        replace(
            one,
            request=replace(one.request, row_id=row.row_id),
            stats=_without_work(one.stats),
        )
        for one in completions
    ]


def _without_work(stats: RequestStats) -> RequestStats:
    """Stats of a follower: all of its prompt was there; time passed as for its leader."""
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
