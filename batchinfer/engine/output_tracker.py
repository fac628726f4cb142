"""Reports the output of unfinished requests in increments, to an observer that stores it.

A sample only grows, so an increment is a slice of its tokens. Beams replace each other, so every
report of a beam search contains all tokens of all beams.
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
        """Return the output that an earlier run stored for an arriving request."""
        ...

    def stepped(
        self, states: Collection[RequestState], ended: Sequence[Completion], output_tokens: int
    ) -> None:
        """Observe a processed step; ``states`` are the running and waiting requests."""
        ...


@dataclass(frozen=True, slots=True)
class OutputIncrement:
    row_id: int
    number: int
    """Index of the request among the requests of its row."""
    key: bytes
    chain: int
    """Number of the chain. A chain is a series of increments that starts at a request's first
    token. A new chain replaces the request's previous chain."""
    stats: RequestStats
    samples: list[tuple[int, PartialSample | SampleOutput]]
    """For each sample, (number of tokens reported before, the sample with only its new tokens)."""


@dataclass(slots=True)
class _Reported:
    skips_prefix_cache: bool
    """``RequestState.skip_prefix_cache``, which changes when the request restarts."""
    sizes: dict[int, int]
    """Number of reported tokens, keyed by sample index; 1 more if the sample's end was reported."""
    chain: int = -1
    """Number of the current chain; -1 until this run reports output. While the number is -1,
    ``sizes`` has the lengths of the request's partial output."""


@dataclass(frozen=True, slots=True)
class _Sample:
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
    """Reports each output token of unfinished requests once. Skips requests without a key."""

    def __init__(self) -> None:
        self._reported: dict[Request, _Reported] = {}

    @property
    def num_tokens(self) -> int:
        """Number of reported tokens of unfinished requests."""
        reported = (known for known in self._reported.values() if known.chain >= 0)
        return sum(sum(known.sizes.values()) for known in reported)

    def take(
        self,
        states: Iterable[RequestState],
        ended: Iterable[Completion],
        *,
        report_all: bool = False,
    ) -> list[OutputIncrement]:
        """Return the increments since the last call, for requests with new output.

        The first increment of a request includes its partial output, so that a reader never has to
        combine the reports of two runs.

        Args:
            states: the running and waiting requests.
            ended: requests that finished without errors, but whose rows have other unfinished
                requests.
            report_all: true to report all output again.
        """
        before, self._reported = self._reported, {}
        increments = []
        requests: list[tuple[Request, RequestStats, Iterator[_Sample], bool | None]] = []
        requests += [(s.request, s.stats, _samples(s), s.skip_prefix_cache) for s in states]
        requests += [(e.request, e.stats, map(_ended, e.outputs), None) for e in ended]
        for request, stats, samples, skips in requests:
            if request.key is None:
                continue
            known = before.get(request) or _Reported(bool(skips), _sizes(request.partial_output))
            self._reported[request] = known
            restarted = skips is not None and skips != known.skips_prefix_cache
            if restarted:
                known.skips_prefix_cache, known.sizes = not known.skips_prefix_cache, {}
            new = everything = list(samples)
            if not report_all:
                new = [s for s in everything if s.size > known.sizes.get(s.index, 0)]
            if not new and not restarted:
                continue
            if report_all or restarted or known.chain < 0 or request.params.beam_width:
                known.chain, known.sizes, new = known.chain + 1, {}, everything
            parts = [sample.since(known.sizes.get(sample.index, 0)) for sample in new]
            known.sizes |= {sample.index: sample.size for sample in new}
            ids = (request.row_id, request.number, request.key)
            increments.append(OutputIncrement(*ids, known.chain, replace(stats), parts))
        return increments


def _sizes(partial: PartialOutput | None) -> dict[int, int]:
    if partial is None:
        return {}
    sizes = {sample.index: len(sample.token_ids) for sample in partial.samples}
    return sizes | {output.index: len(output.token_ids) + 1 for output in partial.finished}


def _samples(state: RequestState) -> Iterator[_Sample]:
    """Yield the samples that have tokens; for a beam search, its beams and then its hypotheses."""
    for rank, sample in enumerate(state.samples):
        if sample.output_ids:
            index = sample.index if state.search is None else rank
            yield _Sample(index, sample.output_ids, sample.cumulative_logprob, sample.logprobs)
    yield from map(_ended, state.finished.values())
    if state.search is not None:
        for rank, best in enumerate(state.search.finished, start=state.request.group_size):
            yield _ended(replace(best, index=rank))


def _ended(output: SampleOutput) -> _Sample:
    return _Sample(
        output.index, output.token_ids, output.cumulative_logprob, output.logprobs, output
    )
