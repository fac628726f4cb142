"""Tables of the statistics of engine steps and of rows' requests."""

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
)
"""Columns that add up over steps; the others are states, as they are at a step."""
_FLOATS = ("t_s", "step_ms", "kv_waste")
_STEP_FIELDS = tuple(entry.name for entry in fields(StepStats))

WORKER = "worker"
"""Who wrote, of several that write to one output; "" for who wrote alone."""

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
"""Tokens of a row's prompt that no row planned before it begins with."""


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
    """Rows of ``steps.parquet``, one for every few steps.

    Counts of the steps between are added to that row, so that their sums hold whatever the
    sampling; states are those of the row's own step.

    Args:
        run_id: the run the steps belong to.
        every: steps per row.
    """

    def __init__(self, run_id: str, every: int) -> None:
        self.peak_used_blocks = 0
        """Most blocks used in any step taken, in a row or not."""
        self._run_id = run_id
        self._every = every
        self._counts: StepRow = dict.fromkeys(_FLOWS, 0)
        self._latest: StepStats | None = None
        self._num_steps = 0
        self._process = psutil.Process()

    def take(self, stats: StepStats, device_bytes: int) -> list[StepRow]:
        """Take a step; a list of the row that it completes, if it does."""
        for name in _FLOWS:
            self._counts[name] += getattr(stats, name)
        self.peak_used_blocks = max(self.peak_used_blocks, stats.kv_blocks_used)
        self._latest = stats
        self._num_steps += 1
        return self.rest(device_bytes) if self._num_steps == self._every else []

    def so_far(self, device_bytes: int) -> StepRow | None:
        """The steps not yet in a row, as one row; they will still be in the next."""
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
        """The steps not yet in a row, as the next row; an empty list where there are none."""
        row = self.so_far(device_bytes)
        self._counts, self._latest, self._num_steps = dict.fromkeys(_FLOWS, 0), None, 0
        return [] if row is None else [row]


REQUEST = pa.struct([field for field in REQUESTS_SCHEMA if field.name not in ("row_id", WORKER)])
"""Statistics of one row's request."""


def with_worker(table: pa.Table, worker: str = "") -> pa.Table:
    """A table with a last column that says who made its rows; as it is where it has one."""
    if WORKER in table.schema.names:
        return table
    return table.append_column(WORKER, pa.repeat(worker, table.num_rows))


def requests_table(
    row_ids: pa.ChunkedArray, requests: pa.ChunkedArray, workers: pa.ChunkedArray
) -> pa.Table:
    """The ``requests`` rows of finished rows; rows that never reached the engine have none.

    Args:
        row_ids: int64.
        requests: ``REQUEST``, null for rows that ran nothing.
        workers: who ran them.
    """
    ran = requests.is_valid()
    columns = requests.filter(ran).combine_chunks().flatten()
    return pa.table([row_ids.filter(ran), *columns, workers.filter(ran)], schema=REQUESTS_SCHEMA)
