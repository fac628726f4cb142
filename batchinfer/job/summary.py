"""The numbers of a job, from its committed files: ``stats/*.parquet`` and ``summary.json``.

Rows count once, however often a crash made a run compute them again. What was computed for rows
that no finished part holds shows in ``steps`` only: there the sum of ``prefill_tokens`` is then
over ``prompt_computed + recomputed``, by what the interrupted runs lost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.job.files import publish, storage_errors
from batchinfer.job.manifest import Manifest
from batchinfer.job.measures import STEP_COLUMNS, Float, measures
from batchinfer.job.output import OutputDir, PartRecord
from batchinfer.job.recorder import Run, package_versions
from batchinfer.job.stats import REQUESTS_SCHEMA, STEPS_SCHEMA

_NO_POOL = {"block_size": 0, "num_blocks": 0, "bytes_per_block": 0}
"""Where no run has loaded the model, because there are no rows."""


def write_summary(out: OutputDir, manifest: Manifest) -> dict[str, Any]:
    """Merge the statistics of all runs, and write and return ``summary.json``.

    Args:
        out: the output directory, whose parts are all finished.
        manifest: its plan.

    Raises:
        StorageError: a file cannot be written.
    """
    parts = manifest.parts()
    steps, requests = out.stats / "steps.parquet", out.stats / "requests.parquet"
    _merge(out, sorted(out.steps.glob("*.parquet")), steps, STEPS_SCHEMA)
    _merge(out, map(out.request_stats, parts), requests, REQUESTS_SCHEMA)
    runs = [Run(**json.loads(path.read_bytes())) for path in sorted(out.runs.iterdir())]
    rows = _rows(record for part in parts if (record := out.finished(part)))
    columns, run_ids = _step_columns(steps)
    block_sizes = {run.run_id: run.kv["block_size"] for run in runs if run.kv}
    block_size = np.array([block_sizes[run_id] for run_id in run_ids], dtype=np.float64)
    engine_s = sum(run.engine_s for run in runs)
    measured = measures(columns, block_size, _column_sums(requests), rows["total"], engine_s)
    summary = {
        "rows": rows,
        "tokens": measured["tokens"],
        "time_s": {
            "total": sum(run.total_s for run in runs),
            "load": sum(run.load_s for run in runs),
            "engine": engine_s,
        },
        "throughput": measured["throughput"],
        "kv": {**_NO_POOL, **runs[-1].kv, **measured["kv"], **_peaks(runs)},
        "model": runs[-1].model,
        "device": runs[-1].device,
        "versions": package_versions(),
        "fingerprint": manifest.fingerprint,
    }
    out.write_json(out.summary, summary)
    return summary


def _peaks(runs: Iterable[Run]) -> dict[str, float]:
    """The peaks by the runs' own records: ``steps.parquet`` may hold a sample of the steps."""
    loaded = [run for run in runs if run.kv]
    return {
        "peak_used_blocks": max((run.peak_used_blocks for run in loaded), default=0),
        "peak_utilization": max(
            (run.peak_used_blocks / run.kv["num_blocks"] for run in loaded), default=0.0
        ),
    }


def _merge(out: OutputDir, files: Iterable[Path], final: Path, schema: pa.Schema) -> None:
    staged = out.staging / final.name
    with storage_errors(final), pq.ParquetWriter(staged, schema, compression="zstd") as writer:
        for file in files:
            writer.write_table(pq.read_table(file))
    publish(staged, final)


def _column_sums(path: Path) -> dict[str, int]:
    table = pq.read_table(path)
    return {
        name: pc.sum(table[name]).as_py() or 0 for name in table.schema.names if name != "row_id"
    }


def _rows(records: Iterable[PartRecord]) -> dict[str, Any]:
    total = control_text = 0
    codes: Counter[str] = Counter()
    for record in records:
        total += record.rows
        control_text += record.control_text_rows
        codes.update(record.error_codes)
    return {
        "total": total,
        "ok": total - codes.total(),
        "error": codes.total(),
        "error_codes": dict(codes.most_common()),
        "control_text": control_text,
    }


def _step_columns(path: Path) -> tuple[dict[str, Float], list[str]]:
    """The columns that measures are made of, and each step's run."""
    table = pq.read_table(path, columns=["run_id", *STEP_COLUMNS])
    columns = {name: np.asarray(table[name].to_numpy(), dtype=np.float64) for name in STEP_COLUMNS}
    return columns, table["run_id"].to_pylist()
