"""A job on a fleet: how many workers, on which devices and cores, started by whom."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from threading import Event
from typing import Any

from batchinfer.console.phases import phase
from batchinfer.console.progress import Progress
from batchinfer.errors import UsageError, install_command
from batchinfer.job.claims.shared import Role
from batchinfer.job.fleet.launcher import Launcher
from batchinfer.job.fleet.local_workers import LocalWorker, WorkerHandle
from batchinfer.job.fleet.reach import is_reached
from batchinfer.job.fleet.worker_process import WorkerSetup
from batchinfer.job.job import BuildEngine, OutputJob
from batchinfer.job.run_ids import run_id, run_number
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.recorder import package_versions
from batchinfer.job.storage.filesystem import storage_errors
from batchinfer.process.cpus import cpu_limits

_WORKERS_PER_CORE = 2
"""More only wait for each other, and take minutes to come up."""


def run_fleet(
    job: OutputJob,
    role: Role,
    build: BuildEngine | None,
    progress: Progress,
    stop: Event,
    on_begin: Callable[[], None],
) -> bool:
    """Make the parts that are not finished, with several workers.

    Args:
        job: as workers open it.
        role: whose parts they make.
        build: makes a worker's engine, in place of ``batchinfer.builders.engine.build_engine``.
        stop: when set, workers put on disk what they have, and end.
        on_begin: called when rows begin to run.

    Returns:
        Whether all parts were made.

    Raises:
        JobError: the fleet cannot be started or run; finished rows are kept.
    """
    scale, on_cluster = job.spec.scale, job.spec.scale.cluster != "local"
    _check_cores(job.spec)
    if on_cluster and not is_reached(scale.cluster, scale.start_timeout_s, stop):
        return False
    with _cluster_gpus(scale.cluster) if on_cluster else nullcontext(_num_gpus(job.spec)) as gpus:
        return _run(job, role, build, progress, stop, on_begin, gpus)


def _run(
    job: OutputJob,
    role: Role,
    build: BuildEngine | None,
    progress: Progress,
    stop: Event,
    on_begin: Callable[[], None],
    num_gpus: int,
) -> bool:
    scale, on_cluster = job.spec.scale, job.spec.scale.cluster != "local"
    has_gpus = job.spec.engine.device == "cuda" or num_gpus > 0
    num_workers = max(1, num_gpus) if scale.workers == "auto" else scale.workers
    worker = Role(role.shard, is_worker=True, has_launcher=True, num_workers=num_workers)
    setup = WorkerSetup(job.spec, worker, package_versions(), build)
    shares_cores = not on_cluster and not has_gpus and job.spec.engine.num_threads is None
    cores = sorted(os.sched_getaffinity(0))[: cpu_limits().count]

    def start(number: int) -> WorkerHandle:
        if on_cluster:
            from batchinfer.job.fleet.ray_workers import RayWorker

            return RayWorker(setup, _resources(scale.resources, has_gpus))
        visible = {"CUDA_VISIBLE_DEVICES": _device(number)} if has_gpus else {}
        own = _share(cores, number, num_workers) if shares_cores else []
        return LocalWorker(setup, own, visible)

    path = job.out.logs / f"{run_id(run_number(job.out.next_run_id), 'launcher')}.log"
    with storage_errors(path), job.out.files.append_to(path) as log:

        def write(line: str) -> None:
            log.write(f"{line}\n".encode())

        write(f"{num_workers} workers are asked for")
        return Launcher(
            start,
            num_workers,
            scale.min_workers,
            scale.start_timeout_s,
            lambda: _is_complete(job, role),
            progress,
            stop,
            write,
            on_begin,
        ).run()


def is_fleet(spec: JobSpec) -> bool:
    """Whether a job is to run on several workers, as far as can be told without its cluster."""
    workers = spec.scale.workers
    if workers == "auto" and spec.scale.cluster == "local":
        return _num_gpus(spec) > 1
    return workers != 1


def _is_complete(job: OutputJob, role: Role) -> bool:
    parts = job.manifest.parts()
    mine = parts if role.shard is None else [parts[at] for at in role.shard.parts(len(parts))]
    recorded = {path.stem for path in job.out.files.entries(job.out.parts)}
    return all(part.name in recorded for part in mine)


def _check_cores(spec: JobSpec) -> None:
    """Check that this machine is not asked for many more engines than it has cores for.

    Raises:
        UsageError: naming how many it has.
    """
    cores, workers = cpu_limits().count, spec.scale.workers
    if spec.scale.cluster != "local" or workers == "auto" or workers <= _WORKERS_PER_CORE * cores:
        return
    if not _num_gpus(spec):
        raise UsageError(
            f"scale.workers is {workers}, and this machine has no GPU for them and {cores} cores",
            hint=f"ask for {cores} workers or fewer; one is as fast",
        )


@contextmanager
def _cluster_gpus(cluster: str) -> Iterator[int]:
    """Be in a Ray cluster; yields how many GPUs it has."""
    try:
        from batchinfer.job.fleet.ray_workers import joined
    except ModuleNotFoundError:
        raise UsageError(
            f"scale.cluster {cluster} needs Ray, which is not installed",
            hint=install_command("ray"),
        ) from None
    with ExitStack() as stack:
        with phase("joining the Ray cluster"):
            gpus = stack.enter_context(joined(cluster))
        yield gpus


def _num_gpus(spec: JobSpec) -> int:
    """GPUs of this machine that workers may use."""
    if spec.engine.device == "cpu":
        return 0
    from batchinfer.builders.device import num_gpus  # imports torch

    return num_gpus()


def _device(number: int) -> str:
    """The GPU of a worker, as ``CUDA_VISIBLE_DEVICES`` names it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else []
    return names[number % len(names)] if names else str(number)


def _share(cores: list[int], number: int, num_workers: int) -> list[int]:
    """The cores of a worker, of those that this process may use."""
    each = len(cores) / num_workers
    own = cores[int(number * each) : int((number + 1) * each)]
    return own or [cores[number % len(cores)]]


def _resources(wanted: Mapping[str, float], has_gpus: bool) -> dict[str, Any]:
    """What Ray sets aside for a worker, as options of an actor."""
    own = {"num_cpus": 1.0, "num_gpus": float(has_gpus)}
    named = {name: amount for name, amount in wanted.items() if name in own}
    return {**own, **named, "resources": {n: a for n, a in wanted.items() if n not in own}}
