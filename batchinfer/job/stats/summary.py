"""``stats/*.parquet`` and ``summary.json``: the numbers of a job, from its committed files.

Rows count once, however often they were computed: again after a crash, or because their part was
damaged. What was computed for them in vain shows in ``steps``, and as recomputed in the summary, so
that the sum of ``prefill_tokens`` is ``prompt_computed + recomputed``. How much of ``recomputed``
that is, is ``lost``; the rest was recomputed within a run, and is the sum of ``recomputed_tokens``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from batchinfer.job.output.part_record import PartRecord
from batchinfer.job.output.stats_tables import (
    DISTINCT_TOKENS,
    REQUESTS_SCHEMA,
    STEPS_SCHEMA,
    WORKER,
    with_worker,
)
from batchinfer.job.run_ids import writer_of
from batchinfer.job.stats.first_errors import first_errors
from batchinfer.job.stats.recorder import STEPS_PER_FILE, Run, package_versions, read_run
from batchinfer.job.stats.wall_time import engine_wall_s, wall_s
from batchinfer.job.storage.filesystem import publish, storage_errors
from batchinfer.text.sample_filter import Tally

_COMPUTED = ("prefill_tokens", "recomputed_tokens")
_NO_POOL = {"block_size": 0, "num_blocks": 0, "bytes_per_block": 0}
"""The pool where no run has loaded the model, because there are no rows."""


def write_summary(
    out: OutputDir,
    manifest: Manifest,
    records: Sequence[PartRecord],
    warn: Callable[[str], None],
    lineage_of: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Merge the statistics of all runs, and write and return ``summary.json``.

    Args:
        out: the output directory, whose parts are all finished.
        warn: told, in a line each, which files of statistics are damaged and left out.
        lineage_of: gives the facts of the run for catalogues of data, from ``rows``; None: there
            are none.

    Raises:
        StorageError: a file cannot be written.
    """
    steps, requests = out.stats / "steps.parquet", out.stats / "requests.parquet"
    step_tables = _tables(out, _named(out, out.steps, ".parquet"), STEPS_SCHEMA, warn)
    with_steps: set[str] = set()
    _merge(out, _noting_runs(_with_unsampled(out, step_tables), with_steps), steps, STEPS_SCHEMA)
    request_files = map(out.request_stats, manifest.parts())
    sums = {name: 0 for name in REQUESTS_SCHEMA.names if name != WORKER}
    request_tables = _summed(_tables(out, request_files, REQUESTS_SCHEMA, warn), sums)
    _merge(out, request_tables, requests, REQUESTS_SCHEMA)
    runs = _runs(out, with_steps, warn)
    latest = ([run for run in runs if run.kv] or runs or [Run("", {})])[-1]
    for line in _changed_kernels(runs):
        warn(line)
    pool, computed = PoolTotals(), dict.fromkeys(_COMPUTED, 0)
    for table in _summed(_batches(out, steps, (*STEP_COLUMNS, *_COMPUTED)), computed):
        _add_known(pool, table, runs)
    rows = {**_rows(records), "first_errors": first_errors(out, manifest, records)}
    measured = compute_metrics(pool, sums, rows["total"] - rows["reused"], engine_wall_s(runs))
    tokens = measured["tokens"]
    # Also what was computed for rows that were then lost with their run, or made again.
    again = computed["prefill_tokens"] - tokens["prompt_computed"]
    tokens["recomputed"] = max(tokens["recomputed"], again)
    tokens["lost"] = max(0, again - computed["recomputed_tokens"])
    summary = {
        "rows": rows,
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
        "kernels": {dtype: " and ".join(names) for dtype, names in _kernels(runs).items()},
        "versions": package_versions(),
        "fingerprint": manifest.fingerprint,
    }
    if lineage_of is not None:
        summary["lineage"] = lineage_of(rows)
    out.write_json(out.summary, summary)
    return summary


def _runs(out: OutputDir, with_steps: set[str], warn: Callable[[str], None]) -> list[Run]:
    """The records of all runs, in order, but for those that are damaged or gone."""
    runs = []
    for run_id in sorted({path.stem for path in _named(out, out.runs, ".json")} | with_steps):
        path = out.runs / f"{run_id}.json"
        try:
            runs.append(read_run(out.files, path))
        except (OSError, ValueError):
            warn(
                f"{path} is damaged or missing: summary.json leaves out that run's time, pool and "
                "kernels"
            )
    return runs


def phase_seconds(runs: Iterable[Run]) -> dict[str, float]:
    """Seconds of the waits that have a name, of all runs, in the order they came."""
    seconds: dict[str, float] = {}
    for run in runs:
        for name, lasted_s in run.phases.items():
            seconds[name] = seconds.get(name, 0.0) + lasted_s
    return seconds


def _kernels(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Kernels of the runs that finished rows, by the dtype of the weights, and what attended, each
    once."""
    names: dict[str, list[str]] = {}
    for run in runs:
        for dtype, name in run.kernels.items() if run.rows else ():
            if name not in names.setdefault(dtype, []):
                names[dtype].append(name)
    return names


def _changed_kernels(runs: Iterable[Run]) -> Iterator[str]:
    """A line for each dtype whose products were computed by one kernel and then by another, and
    for attention."""
    for what, found in _kernels(runs).items():
        if len(found) > 1:
            yield kernels_differ(what, found)


def kernels_differ(what: str, names: Sequence[str]) -> str:
    """That rows of one job are not all computed by one kernel.

    Args:
        what: the dtype of the weights that were multiplied by, or ``attention``.
        names: the kernels.
    """
    did = "computed attention" if what == "attention" else f"multiplied {what}"
    return (
        f"{' and '.join(names)} {did} in different runs of this job: the last bits of their rows' "
        "logits may differ"
    )


def _out_of_memory(runs: Iterable[Run]) -> dict[str, int | None]:
    """Steps that the device had no memory for, and the least tokens steps were cut to for it."""
    sizes = [run.max_num_batched_tokens for run in runs if run.max_num_batched_tokens is not None]
    return {
        "count": sum(run.out_of_memory for run in runs),
        "max_num_batched_tokens": min(sizes, default=None),
    }


def _peaks(runs: Iterable[Run]) -> dict[str, float]:
    """Peaks of pool use, of the runs' records: ``steps.parquet`` may hold a sample of the steps."""
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
    """The tables in ``files``, but for those that are damaged."""
    for file in files:
        try:
            table = with_worker(out.read_table(file))
        except (pa.ArrowException, OSError):
            table = None
        if table is not None and table.schema.equals(schema):
            yield table
        else:
            warn(f"{file} is damaged: the statistics leave it out")


def _with_unsampled(out: OutputDir, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables of steps, and the last steps of runs that died before these were in a table."""
    last_step: dict[str, int] = {}
    for table in tables:
        steps = zip(table["run_id"].to_pylist(), table["step"].to_pylist(), strict=True)
        last_step.update(steps)
        yield table
    for path in _named(out, out.runs, ".json"):
        with suppress(OSError, ValueError):
            row = read_run(out.files, path).unsampled
            if row is not None and row["step"] > last_step.get(path.stem, -1):
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
    """Add the tables' columns to ``sums`` on their way: a million rows are never in memory."""
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


def _noting_runs(tables: Iterable[pa.Table], run_ids: set[str]) -> Iterator[pa.Table]:
    """Add the runs that tables of steps are of to ``run_ids`` on their way."""
    for table in tables:
        run_ids.update(pc.unique(table["run_id"]).to_pylist())
        yield table


def _batches(out: OutputDir, path: PurePath, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Some columns of all steps, and each step's run: a long job's are never in memory."""
    with out.files.open(path) as file:
        reader = pq.ParquetFile(file, page_checksum_verification=True)
        for batch in reader.iter_batches(
            STEPS_PER_FILE, columns=["run_id", *columns], use_threads=False
        ):
            yield pa.Table.from_batches([batch])


def _add_known(pool: PoolTotals, steps: pa.Table, runs: Iterable[Run]) -> None:
    """Add the steps of runs whose block size is known."""
    for run in runs:
        if not run.kv:
            continue
        of_run = steps.filter(pc.equal(steps["run_id"], run.run_id))
        if len(of_run):
            columns = {name: np.asarray(of_run[name], dtype=np.float64) for name in STEP_COLUMNS}
            pool.add(columns, np.full(len(of_run), float(run.kv["block_size"])))
