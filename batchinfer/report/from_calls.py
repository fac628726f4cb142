"""Logs the calls to an ``LLM``, and makes the data of a report about them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from batchinfer.engine.request import RequestStats
from batchinfer.engine.stats import StepStats
from batchinfer.job.stats.run_record import package_versions
from batchinfer.report.histograms import COLUMNS as REQUEST_COLUMNS
from batchinfer.report.histograms import Lengths
from batchinfer.report.report_data import ReportData
from batchinfer.report.timeline import COLUMNS as STEP_COLUMNS
from batchinfer.report.timeline import Float, Timeline
from batchinfer.report.units import moment

_CHUNK_ROWS = 1024


class _Table:
    """A growing table of numbers. One thread adds rows; any thread may read finished rows."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._chunks: list[Float] = []
        self._count = 0

    def add(self, row: Sequence[float]) -> None:
        at = self._count % _CHUNK_ROWS
        if at == 0:
            self._chunks.append(np.zeros((_CHUNK_ROWS, len(self._names))))
        self._chunks[-1][at] = row
        self._count += 1

    def columns(self) -> dict[str, Float]:
        count = self._count
        rows = np.concatenate([np.zeros((0, len(self._names))), *self._chunks])[:count]
        return {name: np.ascontiguousarray(rows[:, at]) for at, name in enumerate(self._names)}


class CallLog:
    """Stores the steps and rows of the calls to an ``LLM``, in about 150 bytes per step."""

    def __init__(self) -> None:
        self._steps = _Table(STEP_COLUMNS)
        self._requests = _Table(REQUEST_COLUMNS)

    def add(self, step: StepStats | None, rows: Sequence[RequestStats], seconds: float) -> None:
        """Add a step and the rows that it finished.

        Args:
            seconds: time that the engine has run so far, without the time between calls.
        """
        if step is not None:
            values = (seconds if name == "t_s" else getattr(step, name) for name in STEP_COLUMNS)
            self._steps.add(tuple(values))
        for row in rows:
            self._requests.add(tuple(getattr(row, name, 0) for name in REQUEST_COLUMNS))

    def report_data(
        self, model: str, device: str, kv: Mapping[str, int], settings: Mapping[str, Any]
    ) -> ReportData:
        """Return the data of a report about the calls so far.

        Args:
            kv: ``block_size``, ``num_blocks`` and ``bytes_per_block``.
            settings: sections, with their keys and values.
        """
        steps = self._steps.columns()
        span_s = float(steps["t_s"].max(initial=0.0))
        timeline, lengths = Timeline(span_s), Lengths()
        timeline.add(steps, 0.0, 0.0, kv["block_size"], kv["bytes_per_block"])
        lengths.add(self._requests.columns())
        return ReportData(
            title="Calls from Python",
            state="so far",
            when=moment(time.time()),
            model=model,
            device=device,
            rows_total=lengths.rows,
            rows_done=lengths.rows,
            rows_failed=0,
            total_s=span_s,
            load_s=0.0,
            engine_s=span_s,
            wall_s=span_s,
            timeline=timeline,
            lengths=lengths,
            kv=kv,
            unit="sequence",
            draws=lengths.sums["output_tokens"] > 0 or not lengths.rows,
            job=settings,
            versions=package_versions(),
        )
