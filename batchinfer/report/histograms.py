"""Histograms of bounded size over rows, however many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

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
"""Columns of ``requests`` that are looked at."""
_MOST_BARS, _LEAST_BARS = 32, 8
"""A few bars stand in the middle of empty ones."""
_MOST_LENGTH = 1 << 22
_STEPS_PER_DECADE = 200  # of times: they are then right to about a percent
_DECADES = (-3, 9)


@dataclass(frozen=True)
class Bars:
    """A histogram: ``counts[i]`` lengths from ``starts[i]`` to below ``starts[i] + width``."""

    starts: list[int]
    width: int
    counts: list[int]
    median: int
    most: int


@dataclass
class Lengths:
    """Collector of rows' lengths and times."""

    rows: int = 0
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))

    def __post_init__(self) -> None:
        self._counts = {name: np.zeros(1, np.int64) for name in SUMS[:2]}
        decades = _DECADES[1] - _DECADES[0]
        self._times = {name: np.zeros(decades * _STEPS_PER_DECADE + 1, np.int64) for name in TIMES}

    def add(self, requests: Mapping[str, Float]) -> None:
        """Add rows: ``COLUMNS`` by name."""
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
        """Histogram of ``prompt_tokens`` or ``output_tokens``; None without rows.

        A few rows far longer than the rest are counted in the last bar, so that the others can be
        told apart.
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
        beside = max(0, _LEAST_BARS - (last - start) // width - 1) // 2 * width
        starts = list(range(max(0, start - beside), last + beside + 1, width))
        summed = [int(counts[at : at + width].sum()) for at in starts]
        summed[-1] += int(counts[starts[-1] + width :].sum())
        return Bars(starts, width, summed, median, most)

    def time_s(self, name: str, share: float) -> float:
        """The time that this share of the rows did not exceed, right to about a percent."""
        cumulative = np.cumsum(self._times[name])
        if not cumulative[-1]:
            return 0.0
        slot = int(np.searchsorted(cumulative, cumulative[-1] * share))
        return 0.0 if slot == 0 else float(10 ** (slot / _STEPS_PER_DECADE + _DECADES[0] - 3))


def _round_up(width: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    decade = 1
    while True:
        for factor in (1, 2, 5):
            if factor * decade >= width:
                return factor * decade
        decade *= 10
