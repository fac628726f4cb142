"""Writes and reads the record of a run: its steps, times and log."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import pyarrow as pa
from pydantic import NonNegativeFloat, NonNegativeInt, TypeAdapter

from batchinfer.console.phases import Phases, active_phases
from batchinfer.engine.metrics import KV_FACTS
from batchinfer.engine.oom_recovery import Recovered
from batchinfer.engine.stats import StepStats
from batchinfer.errors import JobError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.stats_tables import STEPS_SCHEMA, StepRow, StepSampler
from batchinfer.job.run_ids import writer_of
from batchinfer.job.spec.spec import JobSpec, resolved
from batchinfer.job.storage.filesystem import STRICT, Files, read_file, storage_errors

if TYPE_CHECKING:
    from batchinfer.builders.context import EngineContext

STEPS_PER_FILE = 16384


@dataclass
class Run:
    """Record of a run in ``_batchinfer/runs``; times are in seconds."""

    __pydantic_config__: ClassVar = STRICT

    run_id: str
    model: dict[str, Any]
    device: str | None = None
    load_s: NonNegativeFloat = 0.0
    total_s: NonNegativeFloat = 0.0
    phases: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """Seconds of each phase, keyed by name, including phases before this record began."""
    kv: dict[str, NonNegativeInt] = field(default_factory=dict)
    """Values of ``KV_FACTS``; empty if no model was needed."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Kernel names: for linear layers, keyed by the dtype of their weights, and for ``attention``;
    empty if no model was needed."""
    peak_used_blocks: NonNegativeInt = 0
    """Largest number of KV blocks used in a step; steps that ``every_steps`` omits count too."""
    used_blocks: int = 0
    rows: int = 0
    """Number of rows that the run has finished."""
    saved_at: float = 0.0
    """Time when this record was written, in seconds since 1970."""
    ended: bool = False
    """True if the run has ended, even with an error; False if it still runs or has died."""
    error: str = ""
    """Error of a run that failed; "" if it did not fail, or died before it recorded an error."""
    out_of_memory: NonNegativeInt = 0
    """Number of steps that ran out of device memory."""
    max_num_batched_tokens: NonNegativeInt | None = None
    """Token limit per step, as lowered when the device ran out of memory; None if it never did."""
    unsampled: StepRow | None = None
    """The steps that are not in the ``steps`` table yet, combined into one row."""
    job: dict[str, Any] = field(default_factory=dict)
    """The resolved job as JSON data."""

    @property
    def engine_s(self) -> float:
        return self.total_s - self.load_s if self.kv else 0.0


_STORED = TypeAdapter(Run)


def read_run(files: Files, path: PurePath) -> Run:
    """Return the stored record of a run.

    Raises:
        ValueError: the record is damaged.
        OSError: the record cannot be read.
    """
    run = _STORED.validate_json(read_file(files, path))
    has_pool = not run.kv or run.kv.keys() >= set(KV_FACTS)
    has_step = run.unsampled is None or isinstance(run.unsampled.get("step"), int)
    if run.run_id != path.stem or not has_pool or not has_step:
        raise ValueError("the record belongs to another run")
    return run


def runs_of(out: OutputDir) -> Iterator[Run]:
    """Return the records of an output's runs in order, without damaged records."""
    for path in out.files.entries(out.runs):
        with suppress(OSError, ValueError):
            yield read_run(out.files, path)


def kernels_of(runs: Iterable[Run]) -> dict[str, str]:
    """Return the kernels of the last run that finished a row, keyed by dtype; empty if unknown."""
    known = [run.kernels for run in runs if run.rows and run.kernels]
    return known[-1] if known else {}


def wall_s(runs: Sequence[Run]) -> float:
    """Return the seconds during which at least one run was active."""
    return _covered_s(runs, lambda run: run.total_s)


def engine_wall_s(runs: Sequence[Run]) -> float:
    """Return the seconds during which at least one engine was active."""
    return _covered_s(runs, lambda run: run.engine_s)


def _covered_s(runs: Sequence[Run], lasted_s: Callable[[Run], float]) -> float:
    """Return the length of the union of the runs' intervals, which end at ``saved_at``.

    Runs that wrote alone never overlap, so their durations are added even if the clock was set
    back and their intervals seem to overlap.
    """
    alone = sum(lasted_s(run) for run in runs if not writer_of(run.run_id))
    intervals = [
        (run.saved_at - lasted_s(run), run.saved_at) for run in runs if writer_of(run.run_id)
    ]
    covered, until = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        covered += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return alone + covered


class RunRecorder:
    """Writes a run's record, which on disk always includes all finished rows that are on disk."""

    def __init__(self, out: OutputDir, spec: JobSpec, run_id: str) -> None:
        self._out = out
        self.run = Run(run_id, {"name": spec.model.name}, job=resolved(spec))
        self._sampler = StepSampler(self.run.run_id, spec.stats.every_steps)
        self._device_bytes: Callable[[], int] = lambda: 0
        self._phases = active_phases()
        self._began = time.perf_counter()
        self._steps: list[StepRow] = []
        self._num_files = 0
        self._log: BinaryIO | None = None
        self._save()  # the stored record reserves the run's id

    def loaded(self, context: EngineContext, load_s: float, phases: Phases | None = None) -> None:
        """Record the engine and its model.

        Args:
            load_s: seconds that loading took; they count as part of this run.
            phases: phases of loading, used if no phases are active now.
        """
        self._phases = self._phases or phases
        self._began -= load_s
        self.run.load_s = load_s
        self.run.device, self.run.model = context.device, dict(context.model_facts)
        self._device_bytes = context.device_bytes
        self.run.kernels = dict(context.kernels)
        self.run.kv = {name: getattr(context, name) for name in KV_FACTS}
        # Save the record before the first step, because the summary reads a run and its steps
        # together.
        self._save()

    def add(self, step: StepStats | None, num_rows: int) -> None:
        self.run.rows += num_rows
        if step is None:
            return
        self.run.used_blocks = step.kv_blocks_used
        self._steps += self._sampler.take(step, self._device_bytes())
        if len(self._steps) >= STEPS_PER_FILE:
            self._flush()

    def note_recovery(self, recovered: Recovered) -> None:
        """Record a step that ran out of device memory."""
        self.run.out_of_memory += 1
        self.run.max_num_batched_tokens = recovered.max_num_batched_tokens
        self.log(str(recovered))

    def checkpoint(self) -> None:
        """Write all steps so far to disk. Callers write steps before finished rows."""
        self._flush()
        self.run.unsampled = self._sampler.so_far(self._device_bytes())
        self._save()

    def end(self, error: BaseException | None = None) -> None:
        """Write the remaining steps to disk; nothing is recorded afterwards.

        The record says that the run has ended even if its last steps cannot be written.

        Args:
            error: the error of a run that failed.
        """
        self.run.error = "" if error is None else _reason(error)
        self.run.ended = True
        if self._log is not None:
            self._log.close()
        self._steps += self._sampler.rest(self._device_bytes())
        try:
            self._flush()
            self.run.unsampled = None
        finally:
            self._save()

    def log(self, line: str) -> None:
        path = self._out.logs / f"{self.run.run_id}.log"
        with storage_errors(path):
            if self._log is None:
                self._log = self._out.files.append_to(path)
            self._log.write(f"{line}\n".encode())

    def _save(self) -> None:
        self.run.total_s = time.perf_counter() - self._began
        self.run.saved_at = time.time()
        if self._phases is not None:
            self.run.phases = dict(self._phases.seconds)
        self.run.peak_used_blocks = self._sampler.peak_used_blocks
        self._out.write_json(self._out.runs / f"{self.run.run_id}.json", asdict(self.run))

    def _flush(self) -> None:
        if self._steps:
            name = f"{self.run.run_id}-{self._num_files:06d}.parquet"
            table = pa.Table.from_pylist(self._steps, schema=STEPS_SCHEMA)
            self._out.write_table(self._out.steps / name, table)
            self._steps, self._num_files = [], self._num_files + 1


def _reason(error: BaseException) -> str:
    if isinstance(error, JobError):
        return str(error)
    return f"a bug in batchinfer ({type(error).__name__}); see its crash log"


_version = cache(version)  # cached, because it searches all installed packages


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect the output."""
    names = ("batchinfer", "torch", "transformers", "tokenizers", "numpy", "pyarrow")
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}
