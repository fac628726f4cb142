"""Converts tokens of unfinished rows to and from tables with one row per increment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.engine.output_tracker import OutputIncrement
from batchinfer.engine.request import (
    PartialOutput,
    PartialSample,
    Request,
    RequestStats,
    SampleOutput,
    TokenLogprobs,
)
from batchinfer.job.rows.finished_row import LOGPROB, logprob_values
from batchinfer.protocols import StopMatch

RequestId = tuple[int, int]
"""Row id and number of a request."""
Sample = PartialSample | SampleOutput

_COUNTS = tuple(f.name for f in fields(RequestStats) if not f.name.endswith("_ms"))
"""Names of the statistics that the next run continues to count; times begin at zero again."""
_SAMPLE = pa.struct(
    [
        ("index", pa.int32()),
        ("start", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("cumulative_logprob", pa.float64()),
        ("logprobs", pa.list_(LOGPROB)),
        ("finish_reason", pa.string()),
        ("stop_token_id", pa.int32()),
        ("stop_string", pa.string()),
        ("text_end", pa.int64()),
        ("score", pa.float64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("row_id", pa.int64()),
        ("number", pa.int32()),
        ("key", pa.binary(16)),
        ("chain", pa.int32()),
        ("stats", pa.struct([(name, pa.int64()) for name in _COUNTS])),
        ("samples", pa.list_(_SAMPLE)),
    ]
)


def to_table(increments: Sequence[OutputIncrement]) -> pa.Table:
    rows = [
        {
            "row_id": increment.row_id,
            "number": increment.number,
            "key": increment.key,
            "chain": increment.chain,
            "stats": {name: getattr(increment.stats, name) for name in _COUNTS},
            "samples": [_to_fields(start, sample) for start, sample in increment.samples],
        }
        for increment in increments
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def from_table(table: pa.Table) -> Iterable[OutputIncrement]:
    for row in table.to_pylist():
        row["stats"] = RequestStats(**row["stats"])
        row["samples"] = [(fields["start"], _from_fields(fields)) for fields in row["samples"]]
        yield OutputIncrement(**row)


def _to_fields(start: int, sample: Sample) -> dict[str, Any]:
    named = {
        "index": sample.index,
        "start": start,
        "token_ids": sample.token_ids,
        "cumulative_logprob": sample.cumulative_logprob,
        "logprobs": logprob_values(sample.logprobs),
    }
    if isinstance(sample, SampleOutput):
        named |= {"finish_reason": sample.finish_reason, "score": sample.score}
        is_text = isinstance(sample.stop_reason, str)
        named["stop_string" if is_text else "stop_token_id"] = sample.stop_reason
        named["text_end"] = sample.stop_match and sample.stop_match.text_end
    return named


def _from_fields(named: dict[str, Any]) -> Sample:
    logprobs = named["logprobs"] and [
        TokenLogprobs(
            *(token["token_id"], token["logprob"], token["rank"]),
            tuple((top["token_id"], top["logprob"]) for top in token["top"]),
        )
        for token in named["logprobs"]
    ]
    token_ids = np.array(named["token_ids"], dtype=np.int32)
    plain = PartialSample(named["index"], token_ids, named["cumulative_logprob"], logprobs)
    if named["finish_reason"] is None:
        return plain
    stop, text_end = named["stop_string"], named["text_end"]
    return SampleOutput(
        index=plain.index,
        token_ids=token_ids,
        finish_reason=named["finish_reason"],
        stop_reason=named["stop_token_id"] if stop is None else stop,
        stop_match=None if stop is None or text_end is None else StopMatch(stop, text_end),
        cumulative_logprob=plain.cumulative_logprob,
        logprobs=logprobs,
        score=named["score"],
    )


@dataclass(slots=True)
class KeptOutput:
    """The kept output of a request: a chain of increments, each continuing the one before."""

    key: bytes
    chain: tuple[str, int]
    """Id of the run that wrote the increments, and number of the chain."""
    stats: RequestStats
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """Increments of each sample; each begins at the end of the increment before."""

    def add(self, increment: OutputIncrement) -> None:
        """Append an increment, except for samples whose earlier tokens are missing."""
        self.stats = increment.stats
        for start, sample in increment.samples:
            known = self.samples.get(sample.index, [])
            ended = any(isinstance(part, SampleOutput) for part in known)
            if not ended and start == sum(len(part.token_ids) for part in known):
                self.samples[sample.index] = [*known, sample]

    @property
    def num_tokens(self) -> int:
        return sum(len(part.token_ids) for parts in self.samples.values() for part in parts)

    def num_drawn(self, request: Request) -> int:
        """Return the number of drawn tokens, including tokens of dropped beams."""
        beams = request.params.beam_width
        if not beams:
            return self.num_tokens
        lengths = [sum(len(part.token_ids) for part in parts) for parts in self.samples.values()]
        return beams * max(lengths, default=0)

    def whole(self, request: RequestId) -> OutputIncrement:
        """Return the output as a chain of one increment. The chain's number is -1, which the
        ``OutputTracker`` never gives. When the engine resumes the request, the tracker therefore
        begins a new chain, which replaces this one."""
        samples = [(0, _joined(parts)) for parts in self.samples.values()]
        return OutputIncrement(*request, self.key, -1, self.stats, samples)

    def partial(self) -> PartialOutput:
        """Return the output as a ``PartialOutput``, from which the engine continues the request."""
        samples = [_joined(parts) for _, parts in sorted(self.samples.items())]
        return PartialOutput(
            tuple(sample for sample in samples if isinstance(sample, PartialSample)),
            tuple(sample for sample in samples if isinstance(sample, SampleOutput)),
            self.stats,
        )


def _joined(parts: Sequence[Sample]) -> Sample:
    token_ids = np.concatenate([part.token_ids for part in parts])
    logprobs = None
    if parts[-1].logprobs is not None:
        logprobs = [token for part in parts for token in part.logprobs or ()]
    return replace(parts[-1], token_ids=token_ids, logprobs=logprobs)
