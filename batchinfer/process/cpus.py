"""Counts the cores that the machine, the affinity and the cgroup quota let this process use.

File formats: cgroups(7), and the kernel's Documentation/admin-guide/cgroup-v2.rst (``cpu.max``) and
Documentation/scheduler/sched-bwc.rst (``cpu.cfs_quota_us``).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

_PLACES = ("OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Environment variables that make libgomp bind threads, unless ``OMP_PROC_BIND`` is false."""


@dataclass(frozen=True)
class CpuLimits:
    machine: int
    """Number of cores that are online."""
    affinity: int
    """Number of cores on which the threads of this process may run (``taskset``, ``docker
    --cpuset-cpus``); all cores of the machine if OpenMP binds threads."""
    quota: float | None
    """CPU time that the control group may use, as a number of cores; None if unlimited."""

    @property
    def count(self) -> int:
        """Smallest limit, with the quota rounded up; at least 1."""
        cores = min(self.machine, self.affinity)
        return cores if self.quota is None else max(1, min(cores, math.ceil(self.quota)))


def available_cpus() -> int:
    """Return the number of cores that this process may use, at least 1."""
    return cpu_limits().count


def cpu_limits(root: str = "/") -> CpuLimits:
    """Return the limits on the cores of this process.

    Args:
        root: folder with ``proc`` and ``sys``.
    """
    machine = os.cpu_count() or 1
    # A bound thread's affinity is only its own core, not all cores of the process.
    has_affinity = hasattr(os, "sched_getaffinity") and not openmp_binds()
    affinity = len(os.sched_getaffinity(0)) if has_affinity else machine
    return CpuLimits(machine, affinity, cgroup_quota(root))


def openmp_binds(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if libgomp binds each thread to a core, as soon as torch is loaded.

    See OMP_PROC_BIND in the OpenMP specification, and "Environment Variables" in libgomp's manual.
    """
    proc_bind = environ.get("OMP_PROC_BIND", "").strip().lower()
    if proc_bind == "false":
        return False
    return bool(proc_bind) or any(environ.get(name) for name in _PLACES)


def cgroup_quota(root: str = "/") -> float | None:
    """Return the lowest CPU quota of the process's control groups and their parents, in cores.

    Return None if there is no limit. Files that cannot be read or parsed are ignored. In a
    container, only part of the group's path may exist below the mount point, so this function tries
    every contiguous part of the path.
    """
    quotas = list[float]()
    for line in _read(root, "/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        points = list[str]()
        files: tuple[str, ...] = ("cpu.max",)
        if number == "0" and not controllers:
            points = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            points = [f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup/cpu"]
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        parts = group.strip("/").split("/")
        if ".." in parts:  # the group is outside the namespace, so only the mount point is visible
            parts = []
        ends = range(len(parts) + 1)
        for begin, end, point in product(ends, ends, points):
            folder = "/".join([point, *parts[begin:end]])
            quotas += _quota(" ".join(_read(root, f"{folder}/{name}") for name in files))
    return min(quotas, default=None)


def _quota(text: str) -> list[float]:
    fields = text.split()
    if len(fields) != 2 or not all(re.fullmatch("[0-9]{1,18}", field) for field in fields):
        return []  # "max" or -1 (no limit), or not a kernel's file
    quota, period = map(int, fields)
    return [quota / period] if quota and period else []


def _read(root: str, path: str) -> str:
    try:
        with open(
            os.path.join(root, path.lstrip("/")), encoding="utf-8", errors="surrogateescape"
        ) as file:
            return file.read()
    except (OSError, ValueError):
        return ""
