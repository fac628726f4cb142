"""Writes ``stats/*.parquet`` and ``summary.json`` from a job's committed files.

A row counts once, even if it ran again after a crash or because its part was damaged. The lost
computation remains in ``steps`` and counts as recomputed, so that the sum of ``prefill_tokens`` is
``prompt_computed + recomputed``. ``lost`` is the part of ``recomputed`` that crashes and damage
caused. The rest of ``recomputed`` is the sum of ``recomputed_tokens``, which were recomputed within
a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.engine.metrics import STEP_COLUMNS, PoolTotals, compute_metrics, prefix_sharing
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.records.part_record import PartRecord
from batchinfer.job.output.stats_tables import (
    DISTINCT_TOKENS,
    REQUESTS_SCHEMA,
    STEPS_SCHEMA,
    WORKER,
    with_worker,
)
from batchinfer.job.run_ids import writer_of
from batchinfer.job.stats.first_errors import first_errors
from batchinfer.job.stats.run_record import (
    Run,
    engine_wall_s,
    package_versions,
    read_run,
    wall_s,
)
from batchinfer.job.storage.filesystem import publish, storage_errors
from batchinfer.text.sample_filter import Tally

_COMPUTED = ("prefill_tokens", "recomputed_tokens")
_NO_POOL = {"block_size": 0, "num_blocks": 0, "bytes_per_block": 0}
"""Facts about the KV cache if no run loaded the model, because there were no rows."""


def write_summary(
    out: OutputDir,
    manifest: Manifest,
    records: Sequence[PartRecord],
    warn: Callable[[str], None],
    lineage_of: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Merge the statistics of all runs; write and return ``summary.json``.

    Args:
        warn: called with a line for each damaged statistics file, which is left out.
        lineage_of: makes the lineage event from the summary's ``rows``; None for no event.
    """
    stored = {path.stem: _stored_run(out, path) for path in _named(out, out.runs, ".json")}
    runs = [run for _, run in sorted(stored.items()) if run is not None]
    pool, computed, with_steps = PoolTotals(), dict.fromkeys(_COMPUTED, 0), set[str]()

    def steps() -> Iterator[pa.Table]:
        tables = _tables(out, _named(out, out.steps, ".parquet"), STEPS_SCHEMA, warn)
        for table in _summed(_with_unsampled(tables, runs), computed):
            with_steps.update(pc.unique(table["run_id"]).to_pylist())
            _add_to_pool(pool, table, runs)
            yield table

    _merge(out, steps(), out.stats / "steps.parquet", STEPS_SCHEMA)
    sums = {name: 0 for name in REQUESTS_SCHEMA.names if name != WORKER}
    requests = _tables(out, map(out.request_stats, manifest.parts()), REQUESTS_SCHEMA, warn)
    _merge(out, _summed(requests, sums), out.stats / "requests.parquet", REQUESTS_SCHEMA)
    for run_id in sorted(stored.keys() | with_steps):
        if stored.get(run_id) is None:
            path = out.runs / f"{run_id}.json"
            left_out = "the time, pool and kernels of that run"
            warn(f"{path} is damaged or missing, so summary.json leaves out {left_out}")
    latest = ([run for run in runs if run.kv] or runs or [Run("", {})])[-1]
    kernels = _kernels(runs)
    for what, names in kernels.items():
        if len(names) > 1:
            warn(kernels_differ(what, names))
    rows = {**_rows(records), "first_errors": first_errors(out, manifest, records)}
    measured = compute_metrics(pool, sums, rows["total"] - rows["reused"], engine_wall_s(runs))
    tokens = measured["tokens"]
    # ``again`` includes the tokens of rows that were lost with their run or part.
    again = computed["prefill_tokens"] - tokens["prompt_computed"]
    tokens["recomputed"] = max(tokens["recomputed"], again)
    tokens["lost"] = max(0, again - computed["recomputed_tokens"])
    summary = {
        "rows": rows,
        "input": {"replaced_cells": manifest.replaced_cells},
        "tokens": tokens,
        "time_s": {
            "total": sum(run.total_s for run in runs),
            "load": sum(run.load_s for run in runs),
            "engine": sum(run.engine_s for run in runs),
            "wall": wall_s(runs),
            "phases": phase_seconds(runs),
        },
        "workers": len({writer_of(run.run_id) for run in runs if run.rows}),
        "throughput": measured["throughput"],
        "kv": {**_NO_POOL, **latest.kv, **measured["kv"], **_peaks(runs)},
        "sharing": prefix_sharing(
            tokens["prompt"],
            sums[DISTINCT_TOKENS],
            tokens["prompt_computed"],
            sums["deduplicated"],
        ),
        "accept": {entry.name: sums[entry.name] for entry in fields(Tally)},
        "out_of_memory": _out_of_memory(runs),
        "model": latest.model,
        "device": latest.device,
        "kernels": {dtype: " and ".join(names) for dtype, names in kernels.items()},
        "versions": package_versions(),
        "fingerprint": manifest.fingerprint,
    }
    if lineage_of is not None:
        summary["lineage"] = lineage_of(rows)
    out.write_json(out.summary, summary)
    return summary


def _stored_run(out: OutputDir, path: PurePath) -> Run | None:
    try:
        return read_run(out.files, path)
    except (OSError, ValueError):
        return None


def phase_seconds(runs: Iterable[Run]) -> dict[str, float]:
    """Return the seconds of each named phase over all runs, in the order of first use."""
    seconds: dict[str, float] = {}
    for run in runs:
        for name, lasted_s in run.phases.items():
            seconds[name] = seconds.get(name, 0.0) + lasted_s
    return seconds


def _kernels(runs: Iterable[Run]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for run in runs:
        for dtype, name in run.kernels.items() if run.rows else ():
            if name not in names.setdefault(dtype, []):
                names[dtype].append(name)
    return names


def kernels_differ(what: str, names: Sequence[str]) -> str:
    """Return the warning that different kernels computed rows of one job; ``what`` is the dtype of
    the weights, or ``attention``."""
    did = "computed attention" if what == "attention" else f"multiplied {what}"
    return (
        f"{' and '.join(names)} {did} in different runs of this job, so the last "
        "bits of their rows' logits may differ"
    )


def _out_of_memory(runs: Iterable[Run]) -> dict[str, int | None]:
    """Return the number of steps that ran out of device memory, and the smallest token limit that
    was set because of them."""
    sizes = [run.max_num_batched_tokens for run in runs if run.max_num_batched_tokens is not None]
    return {
        "count": sum(run.out_of_memory for run in runs),
        "max_num_batched_tokens": min(sizes, default=None),
    }


def _peaks(runs: Iterable[Run]) -> dict[str, float]:
    """Return the peak use of the KV cache from run records; ``steps.parquet`` may omit steps."""
    loaded = [run for run in runs if run.kv]
    return {
        "peak_used_blocks": max((run.peak_used_blocks for run in loaded), default=0),
        "peak_utilization": max(
            (run.peak_used_blocks / (run.kv["num_blocks"] or 1) for run in loaded), default=0.0
        ),
    }


def _tables(
    out: OutputDir, files: Iterable[PurePath], schema: pa.Schema, warn: Callable[[str], None]
) -> Iterator[pa.Table]:
    for file in files:
        try:
            table = with_worker(out.read_table(file))
        except (pa.ArrowException, OSError):
            table = None
        if table is not None and table.schema.equals(schema):
            yield table
        else:
            warn(f"{file} is damaged, so the statistics leave it out")


def _with_unsampled(tables: Iterable[pa.Table], runs: Iterable[Run]) -> Iterator[pa.Table]:
    """Yield tables of steps, then the last steps of runs that died before writing them."""
    last_step: dict[str, int] = {}
    for table in tables:
        steps = zip(table["run_id"].to_pylist(), table["step"].to_pylist(), strict=True)
        last_step.update(steps)
        yield table
    for run in runs:
        row = run.unsampled
        if row is not None and row["step"] > last_step.get(run.run_id, -1):
            yield pa.Table.from_pylist([{WORKER: "", **row}], schema=STEPS_SCHEMA)


def _named(out: OutputDir, folder: PurePath, suffix: str) -> list[PurePath]:
    return [path for path in out.files.entries(folder) if path.suffix == suffix]


def _merge(out: OutputDir, tables: Iterable[pa.Table], final: PurePath, schema: pa.Schema) -> None:
    staged = out.staging / final.name
    with (
        storage_errors(final),
        out.files.create(staged) as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for table in tables:
            writer.write_table(table)
    publish(out.files, staged, final)


def _summed(tables: Iterable[pa.Table], sums: dict[str, int]) -> Iterator[pa.Table]:
    for table in tables:
        for name in sums:
            sums[name] += pc.sum(table[name]).as_py() or 0
        yield table


def _rows(records: Iterable[PartRecord]) -> dict[str, Any]:
    total = control_text = reused = 0
    codes: Counter[str] = Counter()
    for record in records:
        total += record.rows
        control_text += len(record.control_text_row_ids)
        reused += record.num_reused
        codes.update(record.error_codes)
    return {
        "total": total,
        "ok": total - codes.total(),
        "error": codes.total(),
        "reused": reused,
        "error_codes": dict(codes.most_common()),
        "control_text": control_text,
    }


def _add_to_pool(pool: PoolTotals, steps: pa.Table, runs: Iterable[Run]) -> None:
    for run in runs:
        if not run.kv:
            continue
        of_run = steps.filter(pc.equal(steps["run_id"], run.run_id))
        if len(of_run):
            columns = {name: np.asarray(of_run[name], dtype=np.float64) for name in STEP_COLUMNS}
            pool.add(columns, np.full(len(of_run), float(run.kv["block_size"])))
