"""Makes the tables of statistics about engine steps and about the requests of rows."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import psutil
import pyarrow as pa

from batchinfer.engine.request import RequestStats
from batchinfer.engine.stats import StepStats
from batchinfer.job.run_ids import writer_of
from batchinfer.text.sample_filter import Tally

_FLOWS = (
    "step_ms",
    "num_preempted",
    "prefill_tokens",
    "decode_tokens",
    "recomputed_tokens",
    "cached_tokens",
    "cow_copies",
    "swapped_in_blocks",
    "swapped_out_blocks",
    "images",
    "image_tokens",
    "images_encoded",
    "encode_ms",
)
"""Columns that are summed over steps; the other columns hold the state after a step."""
_FLOATS = ("t_s", "step_ms", "kv_waste", "encode_ms")
_STEP_FIELDS = tuple(entry.name for entry in fields(StepStats))

WORKER = "worker"
"""Column with the name of the writer that ran the row or step; "" for a run that wrote alone."""

STEPS_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        *((name, pa.float64() if name in _FLOATS else pa.int64()) for name in _STEP_FIELDS),
        ("device_bytes", pa.int64()),
        ("host_rss_bytes", pa.int64()),
        (WORKER, pa.string()),
    ]
)
DISTINCT_TOKENS = "distinct_tokens"
"""Column with the number of a row's prompt tokens that are not in a prefix shared with earlier
rows.
"""


REQUESTS_SCHEMA = pa.schema(
    [
        ("row_id", pa.int64()),
        *(
            (entry.name, pa.float64() if entry.name.endswith("_ms") else pa.int64())
            for entry in fields(RequestStats)
        ),
        (DISTINCT_TOKENS, pa.int64()),
        *((entry.name, pa.int64()) for entry in fields(Tally)),
        (WORKER, pa.string()),
    ]
)

StepRow = dict[str, Any]


class StepSampler:
    """Makes rows of ``steps.parquet``, one for every ``every`` steps.

    A row holds counts that are summed over its steps, and the state after its last step.
    """

    def __init__(self, run_id: str, every: int) -> None:
        self.peak_used_blocks = 0
        """Maximum number of KV blocks in use after any step."""
        self._run_id = run_id
        self._every = every
        self._counts: StepRow = dict.fromkeys(_FLOWS, 0)
        self._latest: StepStats | None = None
        self._num_steps = 0
        self._process = psutil.Process()

    def take(self, stats: StepStats, device_bytes: int) -> list[StepRow]:
        """Add a step; return a list with the row that it completes, or an empty list."""
        for name in _FLOWS:
            self._counts[name] += getattr(stats, name)
        self.peak_used_blocks = max(self.peak_used_blocks, stats.kv_blocks_used)
        self._latest = stats
        self._num_steps += 1
        return self.rest(device_bytes) if self._num_steps == self._every else []

    def so_far(self, device_bytes: int) -> StepRow | None:
        """Return a row for the steps since the last row; the next row includes these steps too."""
        if self._latest is None:
            return None
        return {
            "run_id": self._run_id,
            **{name: getattr(self._latest, name) for name in _STEP_FIELDS},
            **self._counts,
            "device_bytes": device_bytes,
            "host_rss_bytes": self._process.memory_info().rss,
            WORKER: writer_of(self._run_id),
        }

    def rest(self, device_bytes: int) -> list[StepRow]:
        """Return a list with one row for the steps since the last row; [] without such steps."""
        row = self.so_far(device_bytes)
        self._counts, self._latest, self._num_steps = dict.fromkeys(_FLOWS, 0), None, 0
        return [] if row is None else [row]


REQUEST = pa.struct([field for field in REQUESTS_SCHEMA if field.name not in ("row_id", WORKER)])
"""Type of the statistics of one row's requests."""


def with_worker(table: pa.Table, worker: str = "") -> pa.Table:
    """Return a table with the ``WORKER`` column appended, unless it has one."""
    if WORKER in table.schema.names:
        return table
    return table.append_column(WORKER, pa.repeat(worker, table.num_rows))


def requests_table(
    row_ids: pa.ChunkedArray, requests: pa.ChunkedArray, workers: pa.ChunkedArray
) -> pa.Table:
    """Return the ``requests`` table of finished rows, without rows that never reached the engine.

    Args:
        row_ids: int64.
        requests: values of type ``REQUEST``, null for rows that did not run.
        workers: names of the writers that ran the rows.
    """
    ran = requests.is_valid()
    columns = requests.filter(ran).combine_chunks().flatten()
    return pa.table([row_ids.filter(ran), *columns, workers.filter(ran)], schema=REQUESTS_SCHEMA)
