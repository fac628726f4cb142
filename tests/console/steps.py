"""Made-up statistics of steps."""

from __future__ import annotations

from dataclasses import fields

from batchinfer.engine.stats import StepStats


def a_step(**values: int) -> StepStats:
    """Return statistics of a step; values that are not given are 0."""
    names = (field.name for field in fields(StepStats))
    return StepStats(**{**dict.fromkeys(names, 0), **values})
