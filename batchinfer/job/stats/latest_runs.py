"""Finds the latest runs of an output: one run, or shards or workers that ran at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchinfer.job.claims.writers import own_lock, writer_named, writers_seen
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run_ids import writer_of
from batchinfer.job.stats.run_record import Run

SILENT_S = 60.0
"""If this machine cannot check a run's lock, the run counts as dead after it has written nothing
for this many seconds, or for three of its write intervals if they are longer."""


@dataclass(frozen=True)
class Worker:
    """One of the latest runs, as ``batchinfer status`` shows it."""

    worker: str
    """The writer's name; "" for a run that writes alone."""
    state: str
    """``running``, ``ended``, ``failed`` (with an error) or ``stopped`` (it died)."""
    rows: int
    """Number of finished rows; a run that died may not have written its last rows."""
    rows_per_s: float | None
    """Speed of the run; None before the first finished row."""
    pool_use: float | None
    """Share of KV blocks used in the last step; None unless the run is alive and has a KV cache."""
    saved_at: float
    """Time when the run last wrote its record, in seconds since 1970."""
    error: str = ""


def latest_workers(out: OutputDir, runs: Sequence[Run], now: float) -> list[Worker]:
    """Return the latest run, and the shards or workers that ran with it.

    Workers of an earlier fleet are left out: they ended before the latest workers began.

    Args:
        runs: all runs of the output, in order.
        now: seconds since 1970.
    """
    spans = []
    for run in _latest(runs):
        worker = _worker(out, run, now)
        ended_at = now if worker.state == "running" else run.saved_at
        spans.append((ended_at, run.saved_at - run.total_s, worker))
    spans.sort(key=lambda span: span[0], reverse=True)
    latest: list[Worker] = []
    began_at = float("-inf")
    for ended_at, worker_began_at, worker in spans:
        writer = writer_named(worker.worker)
        if writer is not None and writer.number is not None and ended_at < began_at:
            continue
        began_at = min(began_at, worker_began_at) if latest else worker_began_at
        latest.append(worker)
    return sorted(latest, key=lambda worker: worker.worker)


def any_lock_lives(out: OutputDir) -> bool:
    """Return True if a living process holds the directory's lock or a writer's lock."""
    return out.lock.holder_lives() is True or any(
        own_lock(out, writer).lock.holder_lives() is True for writer in writers_seen(out)
    )


def writer_lives(out: OutputDir, writer: str) -> bool | None:
    """Return True if the process that holds a writer's lock is alive; None if that is unknown.

    ``writer`` is "" for a run that writes alone.
    """
    named = writer_named(writer)
    return (out if named is None else own_lock(out, named)).lock.holder_lives()


def _latest(runs: Sequence[Run]) -> list[Run]:
    """Return the last run of each writer in the last group of runs."""
    latest: dict[str, Run] = {}
    for run in runs:
        if any(_group(run.run_id) != _group(other.run_id) for other in latest.values()):
            latest.clear()
        latest[writer_of(run.run_id)] = run
    return list(latest.values())


def _group(run_id: str) -> str:
    """Return a key that runs share if they may run at the same time."""
    writer = writer_named(writer_of(run_id))
    return "" if writer is None else writer.team


def _worker(out: OutputDir, run: Run, now: float) -> Worker:
    writer, blocks = writer_of(run.run_id), run.kv.get("num_blocks")
    is_silent = now - run.saved_at >= max(SILENT_S, 3 * out.files.flush_every_s)
    runs = not run.ended and not is_silent and writer_lives(out, writer) is not False
    state = "failed" if run.error else "ended" if run.ended else "stopped"
    return Worker(
        worker=writer,
        state="running" if runs else state,
        rows=run.rows,
        rows_per_s=run.rows / run.engine_s if run.rows and run.engine_s else None,
        pool_use=run.used_blocks / blocks if blocks and runs else None,
        saved_at=run.saved_at,
        error=run.error,
    )
