"""Rows that must come to the same: computed once, and written to each of them.

Where nothing is drawn (temperature 0, or beams), what comes of a row depends on its prompt's token
ids, its adapter and its parameters alone. A row that has all of these in common with one that is in
the engine waits for that one and takes what it comes to, samples or error. Whoever comes later is
computed again, also in the next run: nothing of a row that is done is kept for others. By prefix,
equal rows of a window come one after another, so that this is rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from batchinfer.config import SamplingParams
from batchinfer.engine.request import Completion, RequestStats, TokenIds
from batchinfer.requests import PromptRow
from batchinfer.text.prompts import Prompt

MAX_WAITING = 4096
"""Rows that wait for others, at most: these are in memory, and millions may be equal. More of them
are run: their prompt is computed already, and the engine never lacks rows for those that wait."""

_ASKED = tuple(entry.name for entry in fields(SamplingParams) if entry.name != "seed")


@dataclass(frozen=True, slots=True, eq=False)
class _DedupKey:
    """What decides what comes of a row. Compared as tokens, never by a hash alone."""

    token_ids: TokenIds
    adapter: int
    asked: str

    def __hash__(self) -> int:
        return hash((self.token_ids.tobytes(), self.adapter, self.asked))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _DedupKey)
            and (self.adapter, self.asked) == (other.adapter, other.asked)
            and np.array_equal(self.token_ids, other.token_ids)
        )


@dataclass(slots=True)
class _Leader:
    """A row in the engine, and those that wait for it."""

    key: _DedupKey
    followers: list[PromptRow] = field(default_factory=list)
    """In the order they came."""


class RequestDeduplicator:
    """The rows in the engine, and those that wait for what these come to."""

    def __init__(self) -> None:
        self._by_key: dict[_DedupKey, _Leader] = {}
        self._of_row: dict[int, _Leader] = {}
        self._num_waiting = 0
        self._asked: tuple[SamplingParams, str] | None = None

    def leaders(self, rows: Sequence[PromptRow]) -> list[PromptRow]:
        """Those of ``rows``, which come next, that must run; the others wait for their twins.

        A row's prompt is not needed later by twins that take what it comes to: who needs it is
        whoever comes after the last of them.
        """
        to_run = [row for row in rows if not self.attach(row)]
        return [self._as_the_last(row) for row in to_run]

    def attach(self, row: PromptRow) -> bool:
        """Have a row wait for its twin in the engine; else, rows to come may wait for it.

        Returns:
            Whether it waits, and so must not run.
        """
        assert isinstance(row.prompt, Prompt)
        if row.sampling is None or row.sampling.params.temperature > 0:
            return False
        work = _DedupKey(row.prompt.token_ids, row.adapter, self._text(row.sampling.params))
        first = self._by_key.get(work)
        if first is None:
            self._by_key[work] = self._of_row[row.row_id] = _Leader(work)
            return False
        if self._num_waiting >= MAX_WAITING:
            return False
        first.followers.append(row.with_prompt(token_ids=first.key.token_ids))
        self._num_waiting += 1
        return True

    def release(self, row_id: int) -> list[PromptRow]:
        """The rows that waited for this one, which is done."""
        first = self._of_row.pop(row_id, None)
        if first is None:
            return []
        del self._by_key[first.key]
        self._num_waiting -= len(first.followers)
        return first.followers

    def _as_the_last(self, row: PromptRow) -> PromptRow:
        first = self._of_row.get(row.row_id)
        if first is None or not first.followers:
            return row
        return replace(row, reused_prefix_len=first.followers[-1].reused_prefix_len)

    def _text(self, params: SamplingParams) -> str:
        """All that is asked for but the seed, which nothing is drawn with."""
        if self._asked is None or self._asked[0] is not params:  # most rows have the job's
            self._asked = params, repr([getattr(params, name) for name in _ASKED])
        return self._asked[1]


def copy_result(row: PromptRow, completions: Sequence[Completion]) -> list[Completion]:
    """What another row came to, for ``row``, which waited for it."""
    return [
        replace(
            one,
            request=replace(one.request, row_id=row.row_id),
            stats=_without_work(one.stats),
        )
        for one in completions
    ]


def _without_work(stats: RequestStats) -> RequestStats:
    """All of the prompt was there; time passed as for the row that ran."""
    if not stats.prompt_tokens:  # the engine refused it
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
