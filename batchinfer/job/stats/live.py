"""What a run tells of itself every few seconds, for ``batchinfer status`` on any machine.

``_batchinfer/live/NAME.json`` is small and replaced whole, without a sync: nothing depends on it, a
run goes on where it cannot be written, and deletes it when it ends. One that died leaves it; its
lock, or that it grows old, tells.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, TypeAdapter

from batchinfer.console.meter import Meter
from batchinfer.console.phases import Phases
from batchinfer.errors import JobError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.shards.locks import own_lock
from batchinfer.job.shards.shard import shard_of
from batchinfer.job.stats.workers import SILENT_S
from batchinfer.job.storage.filesystem import STRICT, read_file

_ALONE = "run"
_STORE_EVERY_S = 10.0
_LOCAL_EVERY_S = 2.0


@dataclass
class WatchedRun:
    """A run's waits and progress, for all that tell of them beside the run."""

    name: str
    """The job's."""
    phases: Phases
    meter: Meter | None = None
    """None before it is known what there is to run."""
    summary: Mapping[str, Any] | None = None
    """Of the job, once this run has ended it."""


@dataclass(frozen=True)
class LiveRun:
    """How far a run is; times in seconds."""

    __pydantic_config__: ClassVar = STRICT

    saved_at: float
    """Since 1970."""
    every_s: NonNegativeFloat
    """How often it is written."""
    phase: str = ""
    """What it waits for; "" while rows run."""
    phase_detail: str = ""
    """How far that is."""
    phase_s: NonNegativeFloat = 0.0
    rows_total: NonNegativeInt = 0
    """Rows of the parts that the run makes."""
    rows_finished: NonNegativeInt = 0
    """Of these, rows that are finished, those of earlier runs included."""
    rows_running: NonNegativeInt = 0
    output_tokens: NonNegativeInt = 0
    """Drawn by this run."""
    tokens_per_s: NonNegativeFloat = 0.0
    rows_done: NonNegativeFloat = 0.0
    """As ``rows_finished``, and the share of the running ones that is done."""
    eta_s: NonNegativeFloat | None = None
    is_most: bool = False
    """Whether ``eta_s`` is an upper bound: every row is taken to draw the most that it may."""
    pool_use: NonNegativeFloat | None = None


_STORED = TypeAdapter(LiveRun)


def live_run(watched: WatchedRun, now: float, every_s: float) -> LiveRun:
    """How far a run is now."""
    phase, detail, seconds = watched.phases.current or ("", "", 0.0)
    waits = (now, every_s, phase, detail, max(0.0, seconds))
    meter = watched.meter
    if meter is None:
        return LiveRun(*waits)
    total, eta_s = meter.before + meter.total, meter.eta_s
    return LiveRun(
        *waits,
        rows_total=total,
        rows_finished=meter.before + meter.rows_finished,
        rows_running=meter.rows_running,
        output_tokens=meter.counts.tokens,
        tokens_per_s=meter.tokens_per_s,
        rows_done=meter.share * total,
        eta_s=eta_s if eta_s is None else max(0.0, eta_s),
        is_most=meter.expects_most and meter.counts.begun > 0,
        pool_use=meter.pool,
    )


class LiveFile:
    """The file of one run.

    Args:
        clock: seconds since 1970.
    """

    def __init__(
        self, out: OutputDir, watched: WatchedRun, clock: Callable[[], float] = time.time
    ) -> None:
        self._out = out
        self._path = out.live / f"{out.writer or _ALONE}.json"
        self._watched = watched
        self._clock = clock
        in_store = out.files.flush_every_s > _STORE_EVERY_S
        self.every_s = _STORE_EVERY_S if in_store else _LOCAL_EVERY_S

    def write(self) -> None:
        """Write how far the run is; where that fails, the next time will do."""
        found = live_run(self._watched, self._clock(), self.every_s)
        # Not where all else is staged: others delete that meanwhile.
        files, staged = self._out.files, self._path.with_suffix(".new")
        with suppress(OSError, JobError):
            files.make_directory(self._out.live)
            files.write(staged, json.dumps(asdict(found)).encode())
            files.rename(staged, self._path)

    def delete(self) -> None:
        """Delete it: the run has ended."""
        with suppress(OSError, JobError):
            if self._out.files.stat(self._path) is not None:
                self._out.files.delete(self._path)


def live_runs(out: OutputDir, now: float) -> list[LiveRun]:
    """What the runs that write to an output have told last.

    Args:
        now: seconds since 1970.
    """
    found = []
    for path in out.files.entries(out.live):
        if path.suffix != ".json":
            continue
        with suppress(OSError, ValueError, JobError):
            run = _STORED.validate_json(read_file(out.files, path))
            if now - run.saved_at < max(SILENT_S, 3 * run.every_s) and _may_live(out, path):
                found.append(run)
    return found


def _may_live(out: OutputDir, path: PurePath) -> bool:
    """Whether who wrote a file is not known to have died."""
    shard = None if path.stem == _ALONE else shard_of(path.stem)
    return (out if shard is None else own_lock(out, shard)).lock.holder_lives() is not False
