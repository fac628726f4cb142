"""Runs a job on a fleet: chooses the number of workers and their devices and cores."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from threading import Event
from typing import Any

from batchinfer.console.phases import phase
from batchinfer.console.progress_bar import Progress
from batchinfer.errors import DeviceError, UsageError, install_command
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.fleet.launcher import Launcher
from batchinfer.job.fleet.local_workers import LocalWorker, WorkerHandle
from batchinfer.job.fleet.worker_process import WorkerSetup
from batchinfer.job.job import BuildEngine, OutputJob
from batchinfer.job.run_ids import run_id, run_number
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.run_record import package_versions
from batchinfer.job.storage.filesystem import storage_errors
from batchinfer.process.cpus import cpu_limits

_WORKERS_PER_CORE = 2
"""Maximum number of workers per CPU core. More workers would wait for each other and take minutes
to start."""
_HOST_PORT = re.compile(r"\[?(?P<host>[^\s/]+?)\]?:(?P<port>\d+)")
_CONNECT_S = 1.0
_POLL_S = 0.1


def run_fleet(
    job: OutputJob,
    role: Role,
    build: BuildEngine | None,
    progress: Progress,
    stop: Event,
    on_begin: Callable[[], None],
) -> bool:
    """Compute the unfinished parts with several workers.

    Args:
        role: the shard whose parts the workers compute.
        build: makes a worker's engine; None for ``batchinfer.builders.engine.build_engine``.
        stop: when set, workers write their finished rows to disk and end.
        on_begin: called when the first rows start.

    Returns:
        True if all parts are finished.

    Raises:
        JobError: the fleet cannot be started or run; finished rows are kept.
    """
    scale, on_cluster = job.spec.scale, job.spec.scale.cluster != "local"
    _check_cores(job.spec)
    if on_cluster and not is_reachable(scale.cluster, scale.start_timeout_s, stop):
        return False
    gpus = _cluster_gpus(scale.cluster) if on_cluster else nullcontext(_num_gpus(job.spec))
    path = job.out.logs / f"{run_id(run_number(job.out.next_run_id), 'launcher')}.log"
    with gpus as num_gpus, storage_errors(path), job.out.files.append_to(path) as log:
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
            worker_cores = _share(cores, number, num_workers) if shares_cores else []
            return LocalWorker(setup, worker_cores, visible)

        def write(line: str) -> None:
            log.write(f"{line}\n".encode())

        write(f"starting {num_workers} workers")
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
    """Return True if a job runs on several workers or on a cluster that may provide several."""
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
    """Check that this machine has enough cores for the local workers."""
    cores, workers = cpu_limits().count, spec.scale.workers
    if spec.scale.cluster != "local" or workers == "auto" or workers <= _WORKERS_PER_CORE * cores:
        return
    if not _num_gpus(spec):
        raise UsageError(
            f"scale.workers is {workers}, but this machine has no GPU and only {cores} cores",
            hint=f"use at most {cores} workers; without a GPU, one worker is as fast as several",
        )


@contextmanager
def _cluster_gpus(cluster: str) -> Iterator[int]:
    """Connect to a Ray cluster, and yield the cluster's number of GPUs."""
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


def is_reachable(cluster: str, timeout_s: float, stop: Event) -> bool:
    """Wait until a Ray cluster's port accepts connections; return at once if the port is unknown.

    Args:
        cluster: HOST:PORT, or ``auto`` for the address in RAY_ADDRESS.
        stop: an event that ends the wait.

    Returns:
        False if ``stop`` was set first.

    Raises:
        DeviceError: the host does not exist, or its port accepts no connection in time.
    """
    until = time.monotonic() + timeout_s
    address = os.environ.get("RAY_ADDRESS", "auto") if cluster == "auto" else cluster
    match = _HOST_PORT.fullmatch(address)
    while match is not None and not stop.wait(_POLL_S):
        try:
            socket.create_connection((match["host"], int(match["port"])), _CONNECT_S).close()
            return True
        except OSError as error:
            is_unknown_host = isinstance(error, socket.gaierror)
            if is_unknown_host or time.monotonic() > until:
                within = "" if is_unknown_host else " within scale.start_timeout"
                raise DeviceError(
                    f"cannot reach the Ray cluster {match['host']}:{match['port']}{within}: "
                    f"{error.strerror or error}",
                    hint="check scale.cluster, and check that the cluster is running "
                    "and that this machine can reach it",
                ) from None
    return match is None


def _num_gpus(spec: JobSpec) -> int:
    if spec.engine.device == "cpu":
        return 0
    from batchinfer.builders.device import num_gpus  # slow, because it imports torch

    return num_gpus()


def _device(number: int) -> str:
    """Return a worker's GPU as a value of ``CUDA_VISIBLE_DEVICES``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else []
    return names[number % len(names)] if names else str(number)


def _share(cores: list[int], number: int, num_workers: int) -> list[int]:
    each = len(cores) / num_workers
    share = cores[int(number * each) : int((number + 1) * each)]
    return share or [cores[number % len(cores)]]


def _resources(wanted: Mapping[str, float], has_gpus: bool) -> dict[str, Any]:
    """Return the resources that Ray reserves for a worker, as options of its actor."""
    defaults = {"num_cpus": 1.0, "num_gpus": float(has_gpus)}
    known = {name: amount for name, amount in wanted.items() if name in defaults}
    custom = {name: amount for name, amount in wanted.items() if name not in defaults}
    return {**defaults, **known, "resources": custom}
