"""A worker's start in its own process: the job opened and checked there, the model loaded."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from batchinfer.console.phases import Phases
from batchinfer.errors import DataError, JobError, ModelError
from batchinfer.job.fleet.files.access import worker_output
from batchinfer.job.fleet.files.outbox import Outbox
from batchinfer.job.fleet.messages import (
    Access,
    Assignment,
    Failure,
    Ready,
    WorkerReport,
)
from batchinfer.job.fleet.worker import FleetWorker
from batchinfer.job.input.identity import same_files
from batchinfer.job.input.unique_ids import BadIds
from batchinfer.job.job import BuildEngine, OutputJob, identified, load, open_input, open_job
from batchinfer.job.manifest import Manifest
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.recorder import package_versions
from batchinfer.process.process import bound_spinning, gc_paused, skip_optional_imports


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker is started with."""

    spec: JobSpec
    manifest: Manifest
    """The job's plan, as the driver has it."""
    fingerprint: str
    """Of the job and its model as the driver finds them now."""
    nonce: bytes
    versions: Mapping[str, str] = field(default_factory=package_versions)
    build: BuildEngine | None = None
    """Makes the engine; None: ``batchinfer.builders.engine.build_engine``."""
    pinned_kernels: Mapping[str, str] = field(default_factory=dict)
    bad_ids: BadIds | None = None
    """Rows that are errors for their ids, as the driver has found them."""
    omp_num_threads: str | None = None
    """``OMP_NUM_THREADS`` as the driver has it; Ray sets it where nobody has."""


class WorkerProcess:
    """A worker, as what starts processes calls it; from several threads.

    Args:
        worker: its name.
        run_id: of its run.
        cores: where it may run; none: anywhere.
    """

    def __init__(
        self, setup: WorkerSetup, worker: str, run_id: str, cores: Sequence[int] = ()
    ) -> None:
        if cores:
            _keep_to(cores)
        if setup.omp_num_threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)  # torch is not imported yet
        bound_spinning()
        skip_optional_imports()
        self._setup = setup
        self._name = worker
        self._run_id = run_id
        self._outbox = Outbox()
        self._worker: FleetWorker | None = None

    def load(self) -> Ready | Failure:
        """Load the model, and begin to run leases as they come."""
        phases = Phases()
        try:
            with phases, gc_paused():
                job, access = _open(self._setup, self._name, self._run_id)
                loaded = load(job, self._builder())
        except JobError as error:
            return Failure(type(error).__name__, str(error))
        assert loaded is not None, "a fleet without rows to run"
        self._worker = FleetWorker(job, loaded, self._run_id, self._outbox)
        threading.Thread(target=self._worker.run, daemon=True).start()
        context = loaded.context
        return Ready(socket.gethostname(), context.device, dict(context.kernels), access)

    def report(self, wait_s: float) -> WorkerReport:
        """What is new; within the time, or as soon as the driver should know."""
        return self._outbox.take(wait_s)

    def give(self, assignment: Assignment) -> None:
        """Take a lease."""
        assert self._worker is not None
        self._worker.give(assignment)

    def take_back(self, everything: bool) -> None:
        """Give rows back."""
        assert self._worker is not None
        self._worker.take_back(everything=everything)

    def stop(self) -> None:
        """Put everything on disk, and run nothing more."""
        if self._worker is not None:
            self._worker.stop()

    def _builder(self) -> BuildEngine:
        build = self._setup.build
        if build is None:
            from batchinfer.builders.engine import build_engine  # imports torch

            build = build_engine
        before = self._setup.pinned_kernels
        return partial(build, pinned_kernels=before) if before else build


def _keep_to(cores: Sequence[int]) -> None:
    """Have all threads of this process, and those begun later, run on some cores alone."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def _open(setup: WorkerSetup, worker: str, run_id: str) -> tuple[OutputJob, Access]:
    """The job as it is found here, which must be as the driver found it; which way its files go.

    Raises:
        JobError: it is not, or cannot be opened.
    """
    here = package_versions()
    for name, version in setup.versions.items():
        if here[name] != version:
            raise ModelError(f"{name} is {here[name]} on this node, {version} on the driver's")
    out, access = worker_output(setup.spec.output.path, setup.nonce, worker, run_id)
    source = identified(open_input(setup.spec), setup.manifest)
    if not same_files(setup.manifest.inputs, source.files):
        raise DataError("the input is another on this node than on the driver's")
    job = open_job(setup.spec, source)
    if job.manifest.fingerprint != setup.fingerprint:
        raise ModelError("the model is another on this node than on the driver's")
    source = replace(source, bad_ids=setup.bad_ids)
    return OutputJob(job.spec, source, job.table, setup.manifest, out), access
