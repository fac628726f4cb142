"""Counts rows in histograms, whose size does not grow with the number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from batchinfer.report.timeline import Float

SUMS = (
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "recomputed_tokens",
    "preemptions",
    "swap_preemptions",
    "swapped_blocks",
    "distinct_tokens",
    "deduplicated",
)
TIMES = ("queue_ms", "prefill_ms", "decode_ms", "latency_ms")
COLUMNS = (*SUMS, *TIMES)
"""Columns of ``requests`` that ``Lengths`` reads."""
_MOST_BARS, _LEAST_BARS = 32, 8
"""Maximum and minimum number of bars. If there are too few bars, empty bars are added on both
sides."""
_MOST_LENGTH = 1 << 22
_STEPS_PER_DECADE = 200
"""Number of time slots per factor of ten, so that times are accurate to about a percent."""
_DECADES = (-3, 9)


@dataclass(frozen=True)
class Bars:
    """A histogram: ``counts[i]`` rows have a length from ``starts[i]`` to below ``starts[i] +
    width``."""

    starts: list[int]
    width: int
    counts: list[int]
    median: int
    most: int


@dataclass
class Lengths:
    rows: int = 0
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))

    def __post_init__(self) -> None:
        self._counts = {name: np.zeros(1, np.int64) for name in SUMS[:2]}
        slots = (_DECADES[1] - _DECADES[0]) * _STEPS_PER_DECADE + 1
        self._times = {name: np.zeros(slots, np.int64) for name in TIMES}

    def add(self, requests: Mapping[str, Float]) -> None:
        """Add rows; ``requests`` maps the names in ``COLUMNS`` to arrays [rows]."""
        self.rows += len(requests["prompt_tokens"])
        for name in SUMS:
            self.sums[name] += int(requests[name].sum())
        for name, counts in self._counts.items():
            lengths = np.clip(requests[name], 0, _MOST_LENGTH).astype(np.int64)
            added = np.bincount(lengths, minlength=len(counts))
            added[: len(counts)] += counts
            self._counts[name] = added
        for name, counts in self._times.items():
            log = np.log10(np.maximum(requests[name], 10.0 ** _DECADES[0])) - _DECADES[0]
            slots = np.minimum((log * _STEPS_PER_DECADE).astype(np.int64), len(counts) - 1)
            counts += np.bincount(slots, minlength=len(counts))

    def bars(self, name: str) -> Bars | None:
        """Return the histogram of ``prompt_tokens`` or ``output_tokens``; None without rows.

        The last bar also counts the few rows that are far longer than the rest, so that the scale
        fits the other rows.
        """
        counts = self._counts[name]
        if not counts.sum():
            return None
        cumulative = np.cumsum(counts)
        first, most = int(np.flatnonzero(counts)[0]), int(np.flatnonzero(counts)[-1])
        median = int(np.searchsorted(cumulative, cumulative[-1] / 2))
        shown = int(np.searchsorted(cumulative, cumulative[-1] * 0.99))
        last = most if most <= 2 * shown else shown
        width = _round_up((last - first + 1) / _MOST_BARS)
        start = first // width * width
        padding = max(0, _LEAST_BARS - (last - start) // width - 1) // 2 * width
        starts = list(range(max(0, start - padding), last + padding + 1, width))
        summed = [int(counts[at : at + width].sum()) for at in starts]
        summed[-1] += int(counts[starts[-1] + width :].sum())
        return Bars(starts, width, summed, median, most)

    def time_s(self, name: str, share: float) -> float:
        """Return a quantile of times in seconds: this share of the rows took at most that time."""
        cumulative = np.cumsum(self._times[name])
        slot = int(np.searchsorted(cumulative, cumulative[-1] * share))
        if not cumulative[-1] or slot == 0:
            return 0.0
        return float(10 ** (slot / _STEPS_PER_DECADE + _DECADES[0] - 3))


def _round_up(width: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is at least ``width``."""
    decade = 1
    while 5 * decade < width:
        decade *= 10
    return next(factor * decade for factor in (1, 2, 5) if factor * decade >= width)
