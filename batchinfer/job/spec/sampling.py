"""Sampling as a job says it: parameters, and what their random numbers follow."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from batchinfer.config import SamplingParams


@dataclass(frozen=True)
class JobSampling(SamplingParams):
    """How the output tokens of a row are chosen. Names and meanings are vLLM's.

    Raises:
        TypeError, ValueError: as ``SamplingParams``.
    """

    key: Literal["position", "id"] = "position"
    """What a row's random numbers are keyed by beside the seed: its position in the input, or its
    value of input.id_column, so that its samples stay the same when it moves."""

    @property
    def params(self) -> SamplingParams:
        """The parameters of a row that has none of its own."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(SamplingParams)}
        return SamplingParams(**values)
