"""Output of unfinished requests, as increments, for whoever keeps it until they are finished.

Tokens of a sample are only ever added to, so an increment is a slice of them. The beams of a search
take each other's place, and are given as wholes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from batchinfer.engine.request import (
    Completion,
    PartialOutput,
    PartialSample,
    Request,
    RequestStats,
    SampleOutput,
    TokenIds,
    TokenLogprobs,
)
from batchinfer.engine.sequence import RequestState


class OutputObserver(Protocol):
    """Keeps what unfinished requests draw, and gives it back to those of a later run."""

    def partial_output(self, request: Request) -> PartialOutput | None:
        """What an earlier run has drawn of a request that arrives."""
        ...

    def stepped(
        self, states: Collection[RequestState], ended: Sequence[Completion], output_tokens: int
    ) -> None:
        """Look at the requests that run or wait after a step, which has drawn so many tokens."""
        ...


@dataclass(frozen=True, slots=True)
class OutputIncrement:
    """What one request has come to since the last time."""

    row_id: int
    number: int
    """``Request.number``."""
    key: bytes
    """``Request.key``."""
    chain: int
    """Increments of one chain follow each other; a new one makes those before it void."""
    stats: RequestStats
    samples: list[tuple[int, PartialSample | SampleOutput]]
    """How many of each sample's tokens came before, and the sample without these."""


@dataclass(slots=True)
class _Told:
    """What was told of a request."""

    skips_prefix_cache: bool
    """As its state had it: one that starts over does from there on."""
    sizes: dict[int, int]
    """Tokens of each sample, and one for its end."""
    chain: int = -1
    """-1: nothing was told; the sizes are those of what it brought."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """A sample as far as it has come."""

    index: int
    token_ids: list[int] | TokenIds
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None
    end: SampleOutput | None = None

    @property
    def size(self) -> int:
        return len(self.token_ids) + (self.end is not None)

    def since(self, start: int) -> tuple[int, PartialSample | SampleOutput]:
        token_ids = np.asarray(self.token_ids[start:], dtype=np.int32)
        logprobs = None if self.logprobs is None else self.logprobs[start:]
        if self.end is not None:
            return start, replace(self.end, token_ids=token_ids, logprobs=logprobs)
        return start, PartialSample(self.index, token_ids, self.cumulative_logprob, logprobs)


class OutputTracker:
    """Takes the output of unfinished requests that have a key, each token once."""

    def __init__(self) -> None:
        self._told: dict[Request, _Told] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that were told of requests that are unfinished."""
        return sum(sum(told.sizes.values()) for told in self._told.values() if told.chain >= 0)

    def take(
        self, states: Iterable[RequestState], ended: Iterable[Completion], *, whole: bool = False
    ) -> list[OutputIncrement]:
        """The increments since the last call; requests that have drawn nothing since have none.

        The first of a request that brought a partial output has that, too: nobody has to put
        together what two runs have told.

        Args:
            ended: requests that are finished, without errors, while others of their rows are not.
            whole: give all that there is of each, whatever was told.
        """
        before, self._told = self._told, {}
        increments = []
        found: list[tuple[Request, RequestStats, Iterator[_Sample], bool | None]] = []
        found += [(s.request, s.stats, _samples(s), s.skip_prefix_cache) for s in states]
        found += [(one.request, one.stats, map(_ended, one.outputs), None) for one in ended]
        for request, stats, samples, skips in found:
            if request.key is None:
                continue
            told = before.get(request) or _Told(bool(skips), _sizes(request.partial_output))
            self._told[request] = told
            is_void = skips is not None and skips != told.skips_prefix_cache
            if is_void:
                told.skips_prefix_cache, told.sizes = not told.skips_prefix_cache, {}
            news = everything = list(samples)
            if not whole:
                news = [one for one in everything if one.size > told.sizes.get(one.index, 0)]
            if not news and not is_void:
                continue
            if whole or is_void or told.chain < 0 or request.params.beam_width:
                told.chain, told.sizes, news = told.chain + 1, {}, everything
            parts = [one.since(told.sizes.get(one.index, 0)) for one in news]
            told.sizes |= {one.index: one.size for one in news}
            ids = (request.row_id, request.number, request.key)
            increments.append(OutputIncrement(*ids, told.chain, replace(stats), parts))
        return increments


def _sizes(brought: PartialOutput | None) -> dict[int, int]:
    """Sizes of the samples that a request brought."""
    if brought is None:
        return {}
    sizes = {one.index: len(one.token_ids) for one in brought.samples}
    return sizes | {one.index: len(one.token_ids) + 1 for one in brought.finished}


def _samples(state: RequestState) -> Iterator[_Sample]:
    """The samples of a request that have tokens; of a search its beams, then its hypotheses."""
    for rank, one in enumerate(state.samples):
        if one.output_ids:
            index = one.index if state.search is None else rank
            yield _Sample(index, one.output_ids, one.cumulative_logprob, one.logprobs)
    yield from map(_ended, state.finished.values())
    if state.search is not None:
        for rank, found in enumerate(state.search.finished, start=state.request.group_size):
            ids, total = np.asarray(found.token_ids, dtype=np.int32), found.cumulative_logprob
            yield _ended(SampleOutput(rank, ids, "stop", None, None, total, None, found.score))


def _ended(output: SampleOutput) -> _Sample:
    return _Sample(
        output.index, output.token_ids, output.cumulative_logprob, output.logprobs, output
    )
