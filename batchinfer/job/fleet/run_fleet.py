"""A job on a fleet: workers counted, a cluster to run them in, a driver for both."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from threading import Event
from typing import Any

from batchinfer.console.phases import phase
from batchinfer.console.progress import Progress
from batchinfer.errors import UsageError
from batchinfer.job.fleet.boot import WorkerSetup
from batchinfer.job.fleet.boots import FleetSize
from batchinfer.job.fleet.driver import FleetDriver
from batchinfer.job.fleet.files.access import lent
from batchinfer.job.fleet.files.driver_log import DriverLog
from batchinfer.job.fleet.on_ray.joiner import Joiner
from batchinfer.job.fleet.on_ray.ray_main import ToJoin
from batchinfer.job.fleet.on_ray.ray_process import ray_process
from batchinfer.job.fleet.on_ray.reach import is_reached
from batchinfer.job.job import BuildEngine, OutputJob, open_job
from batchinfer.job.output.recovery.recovered_rows import RecoveredRows
from batchinfer.job.run_ids import run_id, run_number
from batchinfer.job.spec.spec import JobSpec
from batchinfer.process.cpus import cpu_limits

_WORKERS_PER_CORE = 2
"""More only wait for each other, and take minutes to come up."""
_PRELOAD = ("batchinfer.job.fleet.on_ray.preload",)
"""What takes a worker seconds to import: it begins before there is anything to do."""


def run_fleet(
    job: OutputJob,
    recovered: RecoveredRows,
    build: BuildEngine | None,
    pinned_kernels: Mapping[str, str],
    clear: Callable[[], None],
    progress: Progress,
    stop: Event,
    first: Joiner | None = None,
) -> bool:
    """Make the parts that are not finished, with several workers.

    Args:
        recovered: the parts to make, and what is there of them already.
        build: makes a worker's engine, in place of ``batchinfer.builders.engine.build_engine``.
        pinned_kernels: of the runs whose rows stay.
        clear: deletes what is to be overwritten; called when a worker has its model.
        progress: shows finished rows.
        stop: when set, workers put on disk what they have, and end.
        first: the process to join the cluster, where it was begun ahead.

    Returns:
        Whether all parts were made.

    Raises:
        JobError: the fleet cannot be started or run; finished rows are kept.
    """
    began = time.monotonic()
    scale = job.spec.scale
    _check_cores(job.spec)
    if scale.cluster != "local" and not is_reached(scale.cluster, scale.start_timeout_s, stop):
        return False
    number = run_number(job.out.next_run_id)
    to_join = ToJoin(scale.cluster, _num_local(job.spec), preload=_PRELOAD if build is None else ())
    with (
        closing(DriverLog(job.out, run_id(number, "driver"))) as log,
        lent(job.out) as nonce,
        ray_process(to_join, scale.start_timeout_s, stop, first) as workers,
    ):
        with phase("starting Ray"):
            cluster_gpus = workers.join(scale.start_timeout_s - (time.monotonic() - began))
        if cluster_gpus is None:
            return False
        has_gpus = _uses_gpus(job.spec, cluster_gpus)
        num_workers = max(1, cluster_gpus) if scale.workers == "auto" else scale.workers
        shares_cores = scale.cluster == "local" and not has_gpus
        setup = WorkerSetup(
            job.spec,
            job.manifest,
            open_job(job.spec, job.source).manifest.fingerprint,
            nonce,
            build=build,
            pinned_kernels=pinned_kernels,
            bad_ids=job.source.bad_ids,
            omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        )
        size = FleetSize(
            num_workers,
            scale.min_workers,
            scale.start_timeout_s,
            waited_s=time.monotonic() - began,
            same_kernels=not has_gpus and not pinned_kernels,
        )
        workers.use(
            setup,
            _resources(scale.resources, has_gpus),
            _shares(num_workers) if shares_cores and job.spec.engine.num_threads is None else (),
        )
        log(f"{num_workers} workers are asked for")  # takes the run's number

        def clear_all() -> None:
            clear()
            log.begin_again_if_gone()

        return FleetDriver(
            job, recovered, workers, size, number, clear_all, progress, stop, log
        ).run()


def is_fleet(spec: JobSpec) -> bool:
    """Whether a job is to run on several workers, as far as can be told without its cluster."""
    return spec.scale.workers != 1 and (spec.scale.cluster != "local" or _num_local(spec) > 1)


def _check_cores(spec: JobSpec) -> None:
    """Check that this machine is not asked for many more engines than it has cores for.

    Raises:
        UsageError: naming how many it has.
    """
    cores, workers = cpu_limits().count, spec.scale.workers
    if spec.scale.cluster != "local" or workers == "auto" or workers <= _WORKERS_PER_CORE * cores:
        return
    if spec.engine.device == "cpu" or not _num_gpus():
        raise UsageError(
            f"scale.workers is {workers}, and this machine has no GPU for them and {cores} cores",
            hint=f"ask for {cores} workers or fewer; one is as fast",
        )


def _num_local(spec: JobSpec) -> int:
    """Workers on this machine; one for each GPU with ``auto``, one where there is none."""
    workers = spec.scale.workers
    return max(1, _num_gpus()) if workers == "auto" else workers


def _uses_gpus(spec: JobSpec, cluster_gpus: int) -> bool:
    """Whether each worker has a GPU; a cluster that grows may have none yet."""
    return spec.engine.device == "cuda" or (cluster_gpus > 0 and spec.engine.device != "cpu")


def _num_gpus() -> int:
    """GPUs of this machine."""
    from batchinfer.builders.device import num_gpus  # imports torch

    return num_gpus()


def _shares(num_workers: int) -> list[list[int]]:
    """The cores that this process may use, dealt to workers."""
    cores = sorted(os.sched_getaffinity(0))[: cpu_limits().count]
    each = len(cores) / num_workers
    return [
        cores[int(at * each) : int((at + 1) * each)] or [cores[at % len(cores)]]
        for at in range(num_workers)
    ]


def _resources(wanted: Mapping[str, float], has_gpus: bool) -> dict[str, Any]:
    """What Ray sets aside for a worker, as options of an actor."""
    own = {"num_cpus": 1.0, "num_gpus": float(has_gpus)}
    named = {name: amount for name, amount in wanted.items() if name in own}
    return {**own, **named, "resources": {n: a for n, a in wanted.items() if n not in own}}
