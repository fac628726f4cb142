"""The number of cores that a process may use: by machine, affinity and cgroup quota.

Formats: cgroups(7), proc_pid_mountinfo(5), and the kernel's Documentation/admin-guide/cgroup-v2.rst
(``cpu.max``) and Documentation/scheduler/sched-bwc.rst (``cpu.cfs_quota_us``).
"""

from __future__ import annotations

import math
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_FILES = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}
"""Files of a quota and its period, by cgroup version."""
_PLACES = ("OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Set, they make libgomp bind threads, unless ``OMP_PROC_BIND`` is false."""


@dataclass(frozen=True)
class CpuLimits:
    """Limits on the cores of this process."""

    machine: int
    """Cores that are online."""
    affinity: int
    """Cores that its threads may run on (``taskset``, ``docker --cpuset-cpus``); all of the machine
    where OpenMP binds them."""
    quota: float | None
    """CPU time per second that its control group may use; None if unlimited."""

    @property
    def count(self) -> int:
        """The smallest limit, with the quota rounded up; at least 1."""
        cores = min(self.machine, self.affinity)
        return cores if self.quota is None else max(1, min(cores, math.ceil(self.quota)))


def available_cpus() -> int:
    """Returns the number of cores that this process may use, at least 1."""
    return cpu_limits().count


def cpu_limits(root: str = "/") -> CpuLimits:
    """Returns the limits on the cores of this process.

    Args:
        root: folder with ``proc`` and the mount points that it names.
    """
    machine = os.cpu_count() or 1
    # The affinity of a bound thread is its own core, not where the process may run.
    has_affinity = hasattr(os, "sched_getaffinity") and not openmp_binds()
    affinity = len(os.sched_getaffinity(0)) if has_affinity else machine
    return CpuLimits(machine, affinity, cgroup_quota(root))


def openmp_binds(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether libgomp binds each thread to a core, the first as soon as torch is loaded.

    See OMP_PROC_BIND in the OpenMP specification, and "Environment Variables" in libgomp's manual.
    """
    proc_bind = environ.get("OMP_PROC_BIND", "").strip().lower()
    if proc_bind == "false":
        return False
    return bool(proc_bind) or any(environ.get(name) for name in _PLACES)


def cgroup_quota(root: str = "/") -> float | None:
    """Returns the lowest CPU quota of the process's control groups and their parents, in cores.

    None means no limit; files that cannot be read or parsed set none.
    """
    groups = _groups(_read(_under(root, "/proc/self/cgroup")))
    quotas = [
        quota
        for mount in _mounts(_read(_under(root, "/proc/self/mountinfo")))
        if (group := groups.get(mount.version)) is not None
        for folder in mount.folders(group)
        if (quota := _quota(_under(root, folder), mount.version)) is not None
    ]
    return min(quotas, default=None)


@dataclass(frozen=True)
class _Mount:
    """The mount of a cgroup hierarchy that has CPU quotas."""

    version: int
    root: str
    """The group at the mount point."""
    point: str

    def folders(self, group: str) -> Iterator[str]:
        """Yields the folders of a group and its visible parents."""
        inside = posixpath.relpath(group, self.root)
        # A group above the mount or of another namespace: only the mount point is visible.
        parts = [] if inside == "." or inside.startswith("..") else inside.split("/")
        for end in range(len(parts) + 1):
            yield posixpath.join(self.point, *parts[:end])


def _groups(text: str) -> dict[int, str]:
    """Returns the process's group by cgroup version; of version 1, that of ``cpu``."""
    groups: dict[int, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not path.startswith("/"):
            continue
        if number == "0" and not controllers:
            groups[2] = path
        elif "cpu" in controllers.split(","):
            groups[1] = path
    return groups


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.splitlines():
        mount_part, _, filesystem_part = line.partition(" - ")
        mount, filesystem = mount_part.split(" "), filesystem_part.split(" ")
        if len(mount) < 6 or len(filesystem) < 3:
            continue
        root, point = (_unescaped(field) for field in mount[3:5])
        if not root.startswith("/") or not point.startswith("/"):
            continue
        if filesystem[0] == "cgroup2":
            yield _Mount(2, root, point)
        elif filesystem[0] == "cgroup" and "cpu" in filesystem[2].split(","):
            yield _Mount(1, root, point)


def _quota(folder: str, version: int) -> float | None:
    names = _FILES[version]
    fields = " ".join(_read(posixpath.join(folder, name)) for name in names).split()
    if len(fields) != 2 or not all(re.fullmatch("[0-9]{1,18}", field) for field in fields):
        return None  # "max", -1, or not written by a kernel
    quota, period = map(int, fields)
    return quota / period if quota and period else None


def _unescaped(field: str) -> str:
    """Decodes a field of mountinfo, in which whitespace is octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _under(root: str, path: str) -> str:
    return posixpath.join(root, path.lstrip("/"))


def _read(path: str) -> str:
    """Returns a file's text, "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (OSError, ValueError):
        return ""
