"""Output of unfinished requests as increments, for an observer that stores it.

Tokens of a sample are only appended, so that an increment is a slice of them. Beams replace each
other and are reported as a whole.
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
    """Stores the output of unfinished requests and returns it to a later run."""

    def partial_output(self, request: Request) -> PartialOutput | None:
        """The output of an earlier run for an arriving request."""
        ...

    def stepped(
        self, states: Collection[RequestState], ended: Sequence[Completion], output_tokens: int
    ) -> None:
        """Called after each step with the running and waiting requests, the completions, and the
        number of output tokens."""
        ...


@dataclass(frozen=True, slots=True)
class OutputIncrement:
    """New output of one request."""

    row_id: int
    number: int
    """``Request.number``."""
    key: bytes
    """``Request.key``."""
    chain: int
    """Increments of a chain follow each other; a new chain replaces the previous one."""
    stats: RequestStats
    samples: list[tuple[int, PartialSample | SampleOutput]]
    """For each sample the number of tokens reported before, and the sample without them."""


@dataclass(slots=True)
class _Reported:
    """The part of a request's output that was reported."""

    skips_prefix_cache: bool
    """The value in its state, which changes when the request restarts."""
    sizes: dict[int, int]
    """Reported tokens of each sample, plus 1 for its end."""
    chain: int = -1
    """-1: nothing was reported; ``sizes`` are those of its partial output."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """A sample's output so far."""

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
    """Reports the output of unfinished requests that have a key, each token once."""

    def __init__(self) -> None:
        self._reported: dict[Request, _Reported] = {}

    @property
    def num_tokens(self) -> int:
        """Reported tokens of unfinished requests."""
        reported = (known for known in self._reported.values() if known.chain >= 0)
        return sum(sum(known.sizes.values()) for known in reported)

    def take(
        self, states: Iterable[RequestState], ended: Iterable[Completion], *, whole: bool = False
    ) -> list[OutputIncrement]:
        """The increments since the last call, for requests with new output.

        A request's first increment includes its partial output, so that no reader has to combine
        the reports of two runs.

        Args:
            ended: requests that finished without errors while others of their rows have not.
            whole: report everything again.
        """
        before, self._reported = self._reported, {}
        increments = []
        found: list[tuple[Request, RequestStats, Iterator[_Sample], bool | None]] = []
        found += [(s.request, s.stats, _samples(s), s.skip_prefix_cache) for s in states]
        found += [(one.request, one.stats, map(_ended, one.outputs), None) for one in ended]
        for request, stats, samples, skips in found:
            if request.key is None:
                continue
            known = before.get(request) or _Reported(bool(skips), _sizes(request.partial_output))
            self._reported[request] = known
            restarted = skips is not None and skips != known.skips_prefix_cache
            if restarted:
                known.skips_prefix_cache, known.sizes = not known.skips_prefix_cache, {}
            new = everything = list(samples)
            if not whole:
                new = [one for one in everything if one.size > known.sizes.get(one.index, 0)]
            if not new and not restarted:
                continue
            if whole or restarted or known.chain < 0 or request.params.beam_width:
                known.chain, known.sizes, new = known.chain + 1, {}, everything
            parts = [one.since(known.sizes.get(one.index, 0)) for one in new]
            known.sizes |= {one.index: one.size for one in new}
            ids = (request.row_id, request.number, request.key)
            increments.append(OutputIncrement(*ids, known.chain, replace(stats), parts))
        return increments


def _sizes(partial: PartialOutput | None) -> dict[int, int]:
    """Sizes of the samples in a partial output."""
    if partial is None:
        return {}
    sizes = {one.index: len(one.token_ids) for one in partial.samples}
    return sizes | {one.index: len(one.token_ids) + 1 for one in partial.finished}


def _samples(state: RequestState) -> Iterator[_Sample]:
    """The samples of a request that have tokens; for a search its beams, then its hypotheses."""
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
