"""The latest runs of an output: one that writes alone, or several beside each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run_ids import run_number, writer_of
from batchinfer.job.shards.locks import own_lock, shards_seen
from batchinfer.job.shards.shard import shard_of
from batchinfer.job.stats.recorder import Run

SILENT_S = 60.0
"""A run on another machine that has written nothing for so long, or for three times as long as its
finished rows wait, is taken for dead."""
_NUMBER = re.compile(r"^([a-z])\d+")


@dataclass(frozen=True)
class Worker:
    """A run among the latest ones, as ``batchinfer status`` shows it."""

    worker: str
    """Its writer's name; "" for a run that writes alone."""
    state: str
    """``running``, ``ended``, ``failed``: the job failed of it, or ``stopped``: it died."""
    rows: int
    """Rows that it has finished; of one that died, those of its last seconds too, which may not
    have come to disk."""
    rows_per_s: float | None
    """None before it has finished a row."""
    pool_use: float | None
    """Used share of the KV blocks in its last step; None unless it runs, and has a pool."""
    saved_at: float
    """When it last wrote, in seconds since 1970."""
    error: str = ""
    """Why it failed."""


def latest_workers(out: OutputDir, runs: Sequence[Run], now: float) -> list[Worker]:
    """The latest run, with those beside it.

    Args:
        runs: all of an output, in order.
        now: seconds since 1970.
    """
    return [_worker(out, run, now) for run in _latest(runs)]


def any_lock_lives(out: OutputDir) -> bool:
    """Whether a lock is held by who is known to live: of the directory, or of one of its shards."""
    return out.lock.holder_lives() is True or any(
        own_lock(out, shard).lock.holder_lives() is True for shard in shards_seen(out)
    )


def _latest(runs: Sequence[Run]) -> list[Run]:
    """The last run; of those that are beside others, the last of each since one wrote alone."""
    latest: dict[str, Run] = {}
    for run in runs:
        if any(_group(run.run_id) != _group(other.run_id) for other in latest.values()):
            latest.clear()
        latest[writer_of(run.run_id)] = run
    return sorted(latest.values(), key=lambda run: writer_of(run.run_id))


def _group(run_id: str) -> str:
    """What runs beside each other have in common in their ids.

    A shard is begun by itself, and again under another number; workers are, all of them, with
    their driver.
    """
    writer = writer_of(run_id)
    if writer and shard_of(writer) is None:
        return str(run_number(run_id))
    return _NUMBER.sub(r"\1", writer)


def _worker(out: OutputDir, run: Run, now: float) -> Worker:
    shard = shard_of(writer_of(run.run_id))
    lives = (out if shard is None else own_lock(out, shard)).lock.holder_lives()
    silent = now - run.saved_at >= max(SILENT_S, 3 * out.files.flush_every_s)
    runs = not run.ended and not silent and lives is not False
    blocks = run.kv.get("num_blocks")
    return Worker(
        worker=writer_of(run.run_id),
        state="running" if runs else _end(run),
        rows=run.rows,
        rows_per_s=run.rows / run.engine_s if run.rows and run.engine_s else None,
        pool_use=run.used_blocks / blocks if blocks and runs else None,
        saved_at=run.saved_at,
        error=run.error,
    )


def _end(run: Run) -> str:
    return "failed" if run.error else "ended" if run.ended else "stopped"
