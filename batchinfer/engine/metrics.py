"""Computes metrics of tokens, throughput and the KV pool from step and row statistics.

Means are weighted by the duration of each step, and include only steps for which the metric is
defined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from batchinfer.engine.request import RequestStats
from batchinfer.engine.stats import StepStats

Float = npt.NDArray[np.float64]
Metrics = dict[str, dict[str, float]]

STEP_COLUMNS = (
    "step_ms",
    "kv_blocks_total",
    "kv_blocks_used",
    "kv_waste",
    "kv_logical_blocks",
    "kv_tokens_logical",
    "contiguous_blocks",
    "cow_copies",
)
"""Columns of ``stats/steps.parquet`` that the metrics use."""
KV_FACTS = ("block_size", "num_blocks", "bytes_per_block")
"""Names of the pool's sizes, which are reported with its metrics."""
_MEANS = ("mean_utilization", "mean_waste", "contiguous_waste", "sharing_saving")


class PoolTotals:
    """Sums over steps for the KV pool's metrics."""

    def __init__(self) -> None:
        self._peak_used_blocks = 0
        self._peak_utilization = 0.0
        self._cow_copies = 0
        self._means = dict.fromkeys(_MEANS, (0.0, 0.0))
        """For each mean: (weighted sum of the defined values, sum of their weights)."""

    def add(self, steps: Mapping[str, Float], block_size: Float) -> None:
        """Add ``STEP_COLUMNS`` of steps, keyed by name, and the steps' block sizes in tokens."""
        total, used, logical = (
            steps[name] for name in ("kv_blocks_total", "kv_blocks_used", "kv_logical_blocks")
        )
        contiguous = steps["contiguous_blocks"] * block_size
        utilization = _ratio(used, total)
        weights = steps["step_ms"]
        self._peak_used_blocks = max(self._peak_used_blocks, int(used.max(initial=0)))
        self._peak_utilization = max(self._peak_utilization, float(utilization.max(initial=0)))
        self._cow_copies += int(steps["cow_copies"].sum())
        self._add_mean("mean_utilization", utilization, weights, total)
        self._add_mean("mean_waste", steps["kv_waste"], weights, used)
        reserved = 1 - _ratio(steps["kv_tokens_logical"], contiguous)
        self._add_mean("contiguous_waste", reserved, weights, contiguous)
        self._add_mean("sharing_saving", 1 - _ratio(used, logical), weights, logical)

    def metrics(self) -> dict[str, float]:
        """Return the pool's metrics. A mean without a defined value is 0."""
        return {
            "peak_used_blocks": self._peak_used_blocks,
            "peak_utilization": self._peak_utilization,
            "cow_copies": self._cow_copies,
            **{
                name: weighted / weights if weights else 0.0
                for name, (weighted, weights) in self._means.items()
            },
        }

    def _add_mean(self, name: str, values: Float, weights: Float, defined_by: Float) -> None:
        """Add values to a weighted mean; steps where ``defined_by`` is 0 do not count."""
        weights = np.where(defined_by > 0, weights, 0.0)
        weighted, all_weights = self._means[name]
        self._means[name] = (
            weighted + float(values @ weights),
            all_weights + float(weights.sum()),
        )


def compute_metrics(
    pool: PoolTotals,
    requests: Mapping[str, float],
    num_rows: int,
    seconds: float,
) -> Metrics:
    """Return the sections ``tokens``, ``throughput`` and ``kv`` of ``summary.json``.

    Args:
        requests: sums of the fields of ``RequestStats``, keyed by name.
        num_rows: finished rows.
        seconds: time that the engine ran.
    """
    prompt, cached, output = (
        requests[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )
    per_second = 1 / seconds if seconds else 0.0
    return {
        "tokens": {
            "prompt": prompt,
            "prompt_computed": prompt - cached,
            "prompt_cached": cached,
            "recomputed": requests["recomputed_tokens"],
            "output": output,
        },
        "throughput": {
            "output_tokens_per_s": output * per_second,
            "total_tokens_per_s": (prompt + output) * per_second,
            "rows_per_s": num_rows * per_second,
        },
        "kv": {
            **pool.metrics(),
            "prefix_hit_rate": cached / prompt if prompt else 0.0,
            "preemptions": requests["preemptions"],
            "swap_preemptions": requests["swap_preemptions"],
            "swapped_blocks": requests["swapped_blocks"],
        },
    }


def prefix_sharing(
    prompt: float, distinct: float, computed: float, deduplicated: int
) -> dict[str, float]:
    """Return the section ``sharing`` of ``summary.json``: planned and achieved prefix sharing.

    Args:
        distinct: tokens in the prefix trees of the planning windows. Perfect sharing computes
            these tokens, and the last token of each repeated prompt.
        computed: prompt tokens computed at first admission, without recomputation.
        deduplicated: rows that copy the output of an equal row.
    """
    return {
        "prompt_tokens": prompt,
        "distinct_tokens": distinct,
        "planned_rate": 1 - distinct / prompt if prompt else 0.0,
        "achieved_rate": 1 - computed / prompt if prompt else 0.0,
        "achieved_of_planned": distinct / computed if computed else 1.0,
        "deduplicated_rows": deduplicated,
    }


@dataclass(frozen=True, slots=True)
class _Totals:
    """Sums so far. New sums come in a new object, so that readers always see consistent sums."""

    num_steps: int
    requests: Mapping[str, float]
    num_rows: int


class MetricsCollector:
    """Collects statistics of steps and rows in memory, for ``LLM`` and ``plan``.

    One thread adds statistics. Other threads may read at the same time without a lock: a reader
    sees each addition completely or not at all.
    """

    def __init__(self, block_size: int) -> None:
        self.seconds = 0.0
        """Seconds that the engine ran; the caller updates this number."""
        self._block_size = block_size
        self._steps: list[tuple[float, ...]] = []
        self._totals = _Totals(0, asdict(RequestStats()), 0)

    def add(self, step: StepStats | None, rows: Sequence[RequestStats]) -> None:
        if step is not None:
            self._steps.append(tuple(getattr(step, name) for name in STEP_COLUMNS))
        requests = Counter(self._totals.requests)
        for row in rows:
            requests.update(asdict(row))
        self._totals = _Totals(len(self._steps), requests, self._totals.num_rows + len(rows))

    def metrics(self) -> Metrics:
        """Return the sections ``tokens``, ``throughput`` and ``kv`` for the steps so far."""
        totals = self._totals
        rows = np.array(self._steps[: totals.num_steps], np.float64).reshape(-1, len(STEP_COLUMNS))
        # Make the columns contiguous, like columns read from files: the rounding of numpy's sums
        # depends on the memory layout.
        columns = np.ascontiguousarray(rows.T)
        pool = PoolTotals()
        pool.add(
            dict(zip(STEP_COLUMNS, columns, strict=True)),
            np.full(totals.num_steps, float(self._block_size)),
        )
        return compute_metrics(pool, totals.requests, totals.num_rows, self.seconds)


def _ratio(part: Float, total: Float) -> Float:
    return np.divide(part, total, out=np.zeros_like(part), where=total > 0)
