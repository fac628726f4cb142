"""Writes a run's progress every few seconds, and reads it for ``batchinfer status``.

``_batchinfer/live/NAME.json`` holds the progress, which other machines can read too. Nothing else
depends on this small file, so a run replaces it as a whole without fsync and ignores failed writes.
A run that ends deletes its progress file. A run that died leaves the file behind; the run's lock or
the file's age then shows that the run has died.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, TypeAdapter

from batchinfer.console.meter import Meter
from batchinfer.console.phases import Phases
from batchinfer.errors import JobError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.stats.latest_runs import SILENT_S, writer_lives
from batchinfer.job.storage.filesystem import STRICT, read_file

_ALONE = "run"
_STORE_EVERY_S = 10.0
_LOCAL_EVERY_S = 2.0


@dataclass
class WatchedRun:
    """A run's progress, for code that reports it."""

    name: str
    phases: Phases
    meter: Meter | None = None
    """Counts and speed of the run; None until the rows to run are known."""
    summary: Mapping[str, Any] | None = None
    """The job's summary, once this run has finished the job."""


@dataclass(frozen=True)
class LiveRun:
    """Progress of a run; times are in seconds."""

    __pydantic_config__: ClassVar = STRICT

    saved_at: float
    """Time of this report, in seconds since 1970."""
    every_s: NonNegativeFloat
    """Seconds between reports."""
    phase: str = ""
    """Phase that the run waits for, such as loading the model; "" while rows run."""
    phase_detail: str = ""
    phase_s: NonNegativeFloat = 0.0
    rows_total: NonNegativeInt = 0
    rows_finished: NonNegativeInt = 0
    """Number of finished rows among ``rows_total``, including rows that earlier runs finished."""
    rows_running: NonNegativeInt = 0
    output_tokens: NonNegativeInt = 0
    """Number of tokens that this run has drawn."""
    tokens_per_s: NonNegativeFloat = 0.0
    rows_done: NonNegativeFloat = 0.0
    """``rows_finished`` plus the finished fractions of running rows."""
    eta_s: NonNegativeFloat | None = None
    is_most: bool = False
    """True if ``eta_s`` is an upper bound that assumes ``max_tokens`` for every row."""
    pool_use: NonNegativeFloat | None = None


_STORED = TypeAdapter(LiveRun)


def live_run(watched: WatchedRun, now: float, every_s: float) -> LiveRun:
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
        """Write the progress; ignore a failure, because the next write follows soon."""
        progress = live_run(self._watched, self._clock(), self.every_s)
        # Do not write to the staging folder, because other runs clear it.
        files, staged = self._out.files, self._path.with_suffix(".new")
        with suppress(OSError, JobError):
            files.make_directory(self._out.live)
            files.write(staged, json.dumps(asdict(progress)).encode())
            files.rename(staged, self._path)

    def delete(self) -> None:
        with suppress(OSError, JobError):
            if self._out.files.stat(self._path) is not None:
                self._out.files.delete(self._path)


def live_runs(out: OutputDir, now: float) -> list[LiveRun]:
    """Return the progress of the runs that write to an output; ``now`` is in seconds since 1970."""
    runs = []
    for path in out.files.entries(out.live):
        if path.suffix != ".json":
            continue
        with suppress(OSError, ValueError, JobError):
            run = _STORED.validate_json(read_file(out.files, path))
            is_silent = now - run.saved_at >= max(SILENT_S, 3 * run.every_s)
            writer = "" if path.stem == _ALONE else path.stem
            if not is_silent and writer_lives(out, writer) is not False:
                runs.append(run)
    return runs
