"""Reduces steps over time to a few hundred points.

A step's state applies from the end of the previous step to the step's own end, and its computed
tokens are spread evenly over that time. Each point is the exact mean of its slice of time. Memory
does not grow with the number of steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

POINTS = 240
"""Number of points of a chart; more points would not be visible."""
STATES = (
    "num_running",
    "num_waiting",
    "num_swapped",
    "kv_blocks_total",
    "kv_blocks_used",
    "kv_blocks_shared",
    "kv_blocks_cached",
    "kv_logical_blocks",
    "contiguous_blocks",
)
FLOWS = ("prefill_tokens", "decode_tokens", "recomputed_tokens", "cached_tokens")
COLUMNS = (
    *STATES,
    *FLOWS,
    *("t_s", "step_ms", "encode_ms", "images_encoded"),
    *("kv_waste", "kv_tokens_logical", "cow_copies"),
)
"""Columns of ``steps`` that a timeline reads."""


@dataclass(frozen=True)
class Peak:
    """The step with the most running sequences."""

    running: int = 0
    used_bytes: float = 0.0
    pool_bytes: float = 0.0
    contiguous_bytes: float = 0.0


@dataclass
class Totals:
    steps: int = 0
    prompt_ms: float = 0.0
    """Total time of the steps that computed prompt tokens, in milliseconds, including the time in
    which the vision tower encoded images."""
    encode_ms: float = 0.0
    """Total time in which the vision tower encoded images, in milliseconds."""
    images_encoded: int = 0
    answer_ms: float = 0.0
    answer_tokens: int = 0
    """Number of drawn tokens, including tokens of unfinished rows."""
    cow_copies: int = 0
    weighted: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """For each measure, the sum of value times step time, and under ``NAME ms`` the sum of the step
    times for which the measure is defined."""

    def mean(self, name: str) -> float:
        """Return the time-weighted mean of a measure, as in ``summary.json``."""
        weight = self.weighted[f"{name} ms"]
        return self.weighted[name] / weight if weight else 0.0


class Timeline:
    """Collects steps and computes means over slices of time.

    Args:
        span_s: end of the last step; all steps end between 0 and this time.
    """

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self.totals = Totals()
        self.peak = Peak()
        self.peak_utilization = 0.0
        self.began_s: dict[str, float] = {}
        """Start of each run's clock on this timeline, in seconds, keyed by run id."""
        self.busy_s: dict[str, Float] = defaultdict(lambda: np.zeros(POINTS))
        """Seconds of each slice of time in which a run's steps computed, keyed by run id."""
        self.edges_s: Float = np.linspace(0.0, max(span_s, 1e-9), POINTS + 1)
        """Bounds of the slices of time, [POINTS + 1]."""
        self._sums = {name: np.zeros(POINTS) for name in (*STATES, *FLOWS, "waste_blocks")}

    def add(
        self,
        steps: Mapping[str, Float],
        began_s: float,
        offset_s: float,
        block_size: int,
        block_bytes: int,
        run_id: str = "",
    ) -> None:
        """Add steps of one run, in order.

        Args:
            steps: maps the names in ``COLUMNS`` to arrays [steps].
            began_s: end of the previous step, on the run's clock.
            offset_s: start of the run's clock, on this timeline's clock.
            block_size: tokens in a block.
            block_bytes: bytes in a block; the timeline stores counts of blocks in bytes.
        """
        if not len(steps["t_s"]):
            return
        values = {name: steps[name] * (block_bytes if "blocks" in name else 1) for name in STATES}
        values["waste_blocks"] = values["kv_blocks_used"] * steps["kv_waste"]
        ends = np.maximum.accumulate(np.concatenate([[began_s], steps["t_s"]]))
        times, lasted = ends + offset_s, np.diff(ends)
        for name, value in values.items():
            self._sums[name] += self._spread(times, value * lasted)
        for name in FLOWS:
            self._sums[name] += self._spread(times, steps[name])
        self._add_busy(run_id, times, steps["step_ms"] / 1e3)
        self._update_peak(values)
        self._add_totals(steps, block_size)

    def mean(self, name: str) -> Float:
        """Return the mean of a state in each slice of time, or a flow per second, [POINTS].

        States that count blocks are in bytes.
        """
        return self._sums[name] / np.diff(self.edges_s)

    def _spread(self, times: Float, amounts: Float) -> Float:
        """Return the amount in each slice of time, if amounts accrue evenly between ``times``."""
        so_far = np.concatenate([[0.0], np.cumsum(amounts)])
        # If two steps end at the same time, the second step's amount counts in the first step.
        at_edges = np.interp(self.edges_s, times, so_far)
        at_edges[0], at_edges[-1] = 0.0, so_far[-1]
        return np.diff(at_edges)

    def _add_busy(self, run_id: str, times: Float, lasted_s: Float) -> None:
        starts = np.maximum(times[:-1], times[1:] - lasted_s)
        moments = np.concatenate([times[:1], np.stack([starts, times[1:]], axis=1).ravel()])
        amounts = np.stack([np.zeros(len(starts)), times[1:] - starts], axis=1).ravel()
        self.busy_s[run_id] += self._spread(moments, amounts)

    def _update_peak(self, values: Mapping[str, Float]) -> None:
        at = int(np.argmax(values["num_running"]))
        if values["num_running"][at] > self.peak.running:
            names = ("kv_blocks_used", "kv_blocks_total", "contiguous_blocks")
            self.peak = Peak(
                int(values["num_running"][at]), *(float(values[name][at]) for name in names)
            )
        use = _ratio(values["kv_blocks_used"], values["kv_blocks_total"])
        self.peak_utilization = max(self.peak_utilization, float(use.max()))

    def _add_totals(self, steps: Mapping[str, Float], block_size: int) -> None:
        totals, step_ms = self.totals, steps["step_ms"]
        with_prompt = steps["prefill_tokens"] > 0
        totals.steps += len(step_ms)
        totals.prompt_ms += float(step_ms[with_prompt].sum())
        totals.answer_ms += float(step_ms[~with_prompt].sum())
        totals.encode_ms += float(steps["encode_ms"].sum())
        totals.images_encoded += int(steps["images_encoded"].sum())
        totals.answer_tokens += int(steps["decode_tokens"].sum())
        totals.cow_copies += int(steps["cow_copies"].sum())
        used, logical = steps["kv_blocks_used"], steps["kv_logical_blocks"]
        reserved = steps["contiguous_blocks"] * block_size
        for name, value, defined in (
            ("mean_utilization", _ratio(used, steps["kv_blocks_total"]), steps["kv_blocks_total"]),
            ("mean_waste", steps["kv_waste"], used),
            ("contiguous_waste", 1 - _ratio(steps["kv_tokens_logical"], reserved), reserved),
            ("sharing_saving", 1 - _ratio(used, logical), logical),
            ("mean_running", steps["num_running"], step_ms),
        ):
            is_defined = defined > 0
            totals.weighted[name] += float(value[is_defined] @ step_ms[is_defined])
            totals.weighted[f"{name} ms"] += float(step_ms[is_defined].sum())


def _ratio(part: Float, whole: Float) -> Float:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
