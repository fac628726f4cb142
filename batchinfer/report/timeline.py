"""Steps over time as a few hundred points, however many there are.

A step's states are taken to hold from the end of the step before it to its own end, and what it
computed is spread evenly over that time. Every point is then the exact mean of its slice of time,
whatever the number of steps in it; and memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

POINTS = 240
"""Points of a chart; more could not be told apart."""
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
COLUMNS = (*STATES, *FLOWS, "t_s", "step_ms", "kv_waste", "kv_tokens_logical", "cow_copies")
"""Columns of ``steps`` that a timeline is made of."""
_BLOCKS = tuple(name for name in STATES if "blocks" in name)


@dataclass(frozen=True)
class Peak:
    """The step at which most sequences ran."""

    running: int = 0
    used_bytes: float = 0.0
    pool_bytes: float = 0.0
    contiguous_bytes: float = 0.0


@dataclass
class Totals:
    """Sums over all steps."""

    steps: int = 0
    prompt_ms: float = 0.0
    """Of steps that computed prompt tokens, beside what else they computed."""
    answer_ms: float = 0.0
    """Of the other steps."""
    answer_tokens: int = 0
    """Drawn, also for rows that did not end."""
    cow_copies: int = 0
    weighted: dict[str, float] = field(default_factory=dict)
    """Sums of step time x measure, and of step time where the measure is defined."""

    def mean(self, name: str) -> float:
        """A measure of ``summary.json``, with its definition."""
        weight = self.weighted.get(f"{name} ms", 0.0)
        return self.weighted[name] / weight if weight else 0.0


class Timeline:
    """Collector of steps.

    Args:
        span_s: when the last step ends; steps end at times from 0 to this.
    """

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self.totals = Totals()
        self.peak = Peak()
        self.peak_utilization = 0.0
        self.began_s: dict[str, float] = {}
        """When each run's clock began, by its id."""
        self.busy_s: dict[str, Float] = {}
        """Seconds of each slice of time in which a run's steps computed, by its id."""
        self._edges = np.linspace(0.0, max(span_s, 1e-9), POINTS + 1)
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
            steps: ``COLUMNS`` by name.
            began_s: when the step before them ended, on the run's clock.
            offset_s: when the run's clock began, on this timeline's.
            block_size: tokens of a block.
            block_bytes: bytes of a block; what counts blocks is in bytes from here on.
            run_id: its id, where there are several.
        """
        if not len(steps["t_s"]):
            return
        values = {name: steps[name] * (block_bytes if name in _BLOCKS else 1) for name in STATES}
        values["waste_blocks"] = values["kv_blocks_used"] * steps["kv_waste"]
        ends = np.maximum.accumulate(np.concatenate([[began_s], steps["t_s"]]))
        times, lasted = ends + offset_s, np.diff(ends)
        for name, value in values.items():
            self._sums[name] += self._spread(times, value * lasted)
        for name in FLOWS:
            self._sums[name] += self._spread(times, steps[name])
        self._note_busy(run_id, times, steps["step_ms"] / 1e3)
        self._note_peak(values)
        self._count(steps, block_size)

    def states(self, name: str) -> Float:
        """Mean of a state in each slice of time; blocks in bytes."""
        return self._sums[name] / np.diff(self._edges)

    def rate(self, name: str) -> Float:
        """A flow per second in each slice of time."""
        return self.states(name)

    @property
    def edges_s(self) -> Float:
        """Bounds of the slices, one more than there are."""
        return self._edges

    @property
    def middles_s(self) -> Float:
        """Middles of the slices."""
        return (self._edges[1:] + self._edges[:-1]) / 2

    def _spread(self, times: Float, amounts: Float) -> Float:
        """Amounts in each slice of time, where they accrue evenly between ``times``."""
        so_far = np.concatenate([[0.0], np.cumsum(amounts)])
        # Two steps may end at one time: the amount of the second is then in the first that lasts.
        at_edges = np.interp(self._edges, times, so_far)
        at_edges[0], at_edges[-1] = 0.0, so_far[-1]
        return np.diff(at_edges)

    def _note_busy(self, run_id: str, times: Float, lasted_s: Float) -> None:
        starts = np.maximum(times[:-1], times[1:] - lasted_s)
        moments = np.concatenate([times[:1], np.stack([starts, times[1:]], axis=1).ravel()])
        amounts = np.stack([np.zeros(len(starts)), times[1:] - starts], axis=1).ravel()
        before = self.busy_s.get(run_id, np.zeros(POINTS))
        self.busy_s[run_id] = before + self._spread(moments, amounts)

    def _note_peak(self, values: Mapping[str, Float]) -> None:
        at = int(np.argmax(values["num_running"]))
        if values["num_running"][at] > self.peak.running:
            self.peak = Peak(
                int(values["num_running"][at]),
                float(values["kv_blocks_used"][at]),
                float(values["kv_blocks_total"][at]),
                float(values["contiguous_blocks"][at]),
            )
        use = _ratio(values["kv_blocks_used"], values["kv_blocks_total"])
        self.peak_utilization = max(self.peak_utilization, float(use.max()))

    def _count(self, steps: Mapping[str, Float], block_size: int) -> None:
        totals, weights = self.totals, steps["step_ms"]
        with_prompt = steps["prefill_tokens"] > 0
        totals.steps += len(weights)
        totals.prompt_ms += float(weights[with_prompt].sum())
        totals.answer_ms += float(weights[~with_prompt].sum())
        totals.answer_tokens += int(steps["decode_tokens"].sum())
        totals.cow_copies += int(steps["cow_copies"].sum())
        used, logical = steps["kv_blocks_used"], steps["kv_logical_blocks"]
        reserved = steps["contiguous_blocks"] * block_size
        for name, value, defined in (
            ("mean_utilization", _ratio(used, steps["kv_blocks_total"]), steps["kv_blocks_total"]),
            ("mean_waste", steps["kv_waste"], used),
            ("contiguous_waste", 1 - _ratio(steps["kv_tokens_logical"], reserved), reserved),
            ("sharing_saving", 1 - _ratio(used, logical), logical),
            ("mean_running", steps["num_running"], weights),
        ):
            is_defined = defined > 0
            sums = {
                name: value[is_defined] @ weights[is_defined],
                f"{name} ms": weights[is_defined].sum(),
            }
            for key, amount in sums.items():
                totals.weighted[key] = totals.weighted.get(key, 0.0) + float(amount)


def _ratio(part: Float, whole: Float) -> Float:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
