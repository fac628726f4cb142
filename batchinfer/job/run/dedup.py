"""Deduplication of requests: of equal rows that draw nothing, one is computed.

Where nothing is drawn (temperature 0, or beams), what comes of a row depends on its prompt's token
ids, its adapter and its parameters alone. A row that has all of these in common with one that is in
the engine follows it: it waits for that one and takes what it comes to, samples or error. Whoever
comes later is computed again, also in the next run: nothing of a row that is done is kept for
others. By prefix, equal rows of a window come one after another, so that this is rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from batchinfer.config import SamplingParams
from batchinfer.engine.request import Completion, RequestStats, TokenIds
from batchinfer.errors import RowError
from batchinfer.job.rows.row_key import canonical_params
from batchinfer.requests import PromptRow

MAX_WAITING = 4096
"""Rows that wait for others, at most: these are in memory, and millions may be equal. More of them
are run: their prompt is computed already, and the engine never lacks rows for those that wait."""


@dataclass(frozen=True, slots=True, eq=False)
class _DedupKey:
    """A row's prompt, adapter and parameters; compared as tokens, never by a hash alone."""

    token_ids: TokenIds
    adapter: int
    params: str

    def __hash__(self) -> int:
        return hash((self.token_ids.tobytes(), self.adapter, self.params))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _DedupKey)
            and (self.adapter, self.params) == (other.adapter, other.params)
            and np.array_equal(self.token_ids, other.token_ids)
        )


@dataclass(slots=True)
class _Leader:
    """A row in the engine, and the equal ones that wait for it."""

    key: _DedupKey
    followers: list[PromptRow] = field(default_factory=list)
    """In the order they came."""


class RequestDeduplicator:
    """Leaders, which are in the engine, and their followers, which wait for what they come to."""

    def __init__(self) -> None:
        self._by_key: dict[_DedupKey, _Leader] = {}
        self._of_row: dict[int, _Leader] = {}
        self._num_waiting = 0
        self._latest: tuple[SamplingParams, str] | None = None

    def leaders(self, rows: Sequence[PromptRow]) -> list[PromptRow]:
        """The rows that must run, of those that come next; the others wait for equal ones.

        Followers do not need their leader's prompt later, as they do not run: whoever comes after
        the last of them does.
        """
        leaders = [row for row in rows if not self.attach(row)]
        for row in leaders:
            leader = self._of_row.get(row.row_id)
            if leader is not None and leader.followers:
                row.reused_prefix_len = leader.followers[-1].reused_prefix_len
        return leaders

    def attach(self, row: PromptRow) -> bool:
        """Have a row follow an equal one in the engine; else, rows to come may follow it.

        Returns:
            Whether it waits, and so must not run.
        """
        assert not isinstance(row.prompt, RowError)
        if row.sampling is None or row.sampling.params.temperature > 0:
            return False
        key = _DedupKey(row.prompt.token_ids, row.adapter, self._text(row.sampling.params))
        leader = self._by_key.get(key)
        if leader is None:
            self._by_key[key] = self._of_row[row.row_id] = _Leader(key)
            return False
        if self._num_waiting >= MAX_WAITING:
            return False
        row.prompt = replace(row.prompt, token_ids=leader.key.token_ids)  # held once
        leader.followers.append(row)
        self._num_waiting += 1
        return True

    def release(self, row_id: int) -> list[PromptRow]:
        """The followers of a row that is done."""
        leader = self._of_row.pop(row_id, None)
        if leader is None:
            return []
        del self._by_key[leader.key]
        self._num_waiting -= len(leader.followers)
        return leader.followers

    def _text(self, params: SamplingParams) -> str:
        """Parameters but for the seed, which nothing is drawn with."""
        if self._latest is None or self._latest[0] is not params:  # most rows have the job's
            self._latest = params, f"{params.max_tokens} {canonical_params(params)}"
        return self._latest[1]


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
