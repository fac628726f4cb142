"""Builds sampling batches; the defaults of all parameters have no effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.engine.step import Penalties, SamplingBatch, SamplingColumns


@dataclass(frozen=True)
class Sample:
    """One sample of a batch, with the parameters that a user sets."""

    row: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stream: int = 0
    index: int = 0
    position: int = 0
    logprobs: int = -1
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] = ()

    @property
    def penalized(self) -> bool:
        return (self.presence, self.frequency, self.repetition) != (0.0, 0.0, 1.0)


def make_batch(samples: Sequence[Sample]) -> SamplingBatch:
    """Return the samples as the struct of arrays that a step contains."""

    def column(name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.array([getattr(sample, name) for sample in samples], dtype)

    bias = [(k, i, v) for k, s in enumerate(samples) for i, v in s.bias.items()]
    allowed = [(k, i) for k, s in enumerate(samples) for i in s.allowed]
    columns = SamplingColumns.zeros(len(samples))
    for at, sample in enumerate(samples):
        columns.set_row(
            at,
            sample,
            presence_penalty=sample.presence,
            frequency_penalty=sample.frequency,
            repetition_penalty=sample.repetition,
            sample_index=sample.index,
            num_logprobs=sample.logprobs,
        )
    return SamplingBatch(
        **columns.take(np.arange(len(samples))),
        logits_rows=column("row", np.int32),
        position=column("position", np.int32),
        penalties=_penalties(samples),
        bias_samples=np.array([k for k, _, _ in bias], np.int32),
        bias_token_ids=np.array([i for _, i, _ in bias], np.int32),
        bias_values=np.array([v for _, _, v in bias], np.float32),
        allowed_samples=np.array([k for k, _ in allowed], np.int32),
        allowed_token_ids=np.array([i for _, i in allowed], np.int32),
    )


def _penalties(samples: Sequence[Sample]) -> Penalties | None:
    at = [k for k, sample in enumerate(samples) if sample.penalized]
    if not at:
        return None
    return Penalties(
        samples=np.array(at, np.int32),
        prompt_token_ids=_padded([samples[k].prompt for k in at]),
        output_token_ids=_padded([samples[k].output for k in at]),
    )


def _padded(lists: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    matrix = np.full((len(lists), max(map(len, lists))), -1, np.int32)
    for row, ids in zip(matrix, lists, strict=True):
        row[: len(ids)] = ids
    return matrix
