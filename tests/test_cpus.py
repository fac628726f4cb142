"""Cores that a process may use, read from made-up ``/proc`` and ``/sys`` trees."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.process.cpus import (
    CpuLimits,
    available_cpus,
    cgroup_quota,
    cpu_limits,
    openmp_binds,
)


def tree(root: Path, cgroup: str, files: Mapping[str, str]) -> str:
    """Write a root folder with a process's control groups and the files of a hierarchy."""
    files = {"proc/self/cgroup": cgroup, **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode("utf-8", "replace"))
    return str(root)


def v1_quota(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    names = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period}
    return {f"{folder}/{name}": f"{value}\n" for name, value in names.items()}


V1 = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        ("4:memory:/a\n2:cpu,cpuacct:/b\n", v1_quota(f"{V1}/b", 250_000), 2.5),
        (
            "2:cpu,cpuacct:/b\n0::/a\n",
            {"sys/fs/cgroup/unified/a/cpu.max": "300000 100000\n"} | v1_quota(f"{V1}/b", 200_000),
            2.0,
        ),
        ("2:cpu,cpuacct:/docker/5e1f\n", v1_quota(V1, 150_000), 1.5),
        ("2:cpu,cpuacct:/docker/5e1f/in\n", v1_quota(V1, -1) | v1_quota(f"{V1}/in", 50_000), 0.5),
        ("0::/../../elsewhere\n", {"sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1.0),
        ("0::/a..b\n", {"sys/fs/cgroup/a..b/cpu.max": "100000 100000\n"}, 1.0),
    ],
    ids=["namespace", "version 1", "both versions", "host", "in a container", "outside", "dots"],
)
def test_cgroup_quota(
    tmp_path: Path, cgroup: str, files: Mapping[str, str], expected: float
) -> None:
    assert cgroup_quota(tree(tmp_path, cgroup, files)) == expected


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(str(tmp_path)) is None
    assert cpu_limits(str(tmp_path)).quota is None


@pytest.mark.parametrize(
    "text", ["", "max", "0 100000", "100000 0", "-1 100000", "1e5 100000", "²00 100", "1 2 3", "\0"]
)
def test_an_invalid_cgroup_quota_is_no_limit(text: str, tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": text}
    assert cgroup_quota(tree(tmp_path, "0::/\n", files)) is None


@given(
    quotas=st.lists(
        st.none() | st.tuples(st.integers(1, 10**7), st.integers(1000, 10**6)), min_size=1
    ),
    version=st.sampled_from([1, 2]),
)
def test_lowest_quota_of_nested_cgroups_counts(
    quotas: list[tuple[int, int] | None], version: int
) -> None:
    point = "sys/fs/cgroup" if version == 2 else V1
    files: dict[str, str] = {}
    for depth, one in enumerate(quotas):
        folder = "/".join([point, *["g"] * depth])
        if version == 1:
            files |= v1_quota(folder, *(one or (-1, 100_000)))
        else:
            quota, period = one or ("max", 100_000)
            files[f"{folder}/cpu.max"] = f"{quota} {period}\n"
    group = "/" + "/".join(["g"] * (len(quotas) - 1))
    cgroup = f"0::{group}\n" if version == 2 else f"2:cpu,cpuacct:{group}\n"
    with tempfile.TemporaryDirectory() as folder:
        root = tree(Path(folder), cgroup, files)
        known = [one[0] / one[1] for one in quotas if one is not None]
        assert cgroup_quota(root) == min(known, default=None)


LINES = st.lists(
    st.sampled_from(["0::/a\n", "2:cpu,cpuacct:/a\n", "0::", ":::\n"]) | st.text(max_size=40)
)


@given(cgroup=LINES, quota=st.text(max_size=30))
def test_malformed_cgroup_files_are_ignored(cgroup: list[str], quota: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = {"sys/fs/cgroup/cpu.max": quota}
        found = cgroup_quota(tree(Path(folder), "".join(cgroup), files))
    assert found is None or found > 0


@pytest.mark.parametrize(
    ("machine", "affinity", "quota", "count"),
    [
        (64, 64, None, 64),
        (64, 8, None, 8),
        (64, 64, 1.5, 2),
        (4, 4, 0.5, 1),
        (64, 2, 16.0, 2),
        (4, 64, None, 4),
    ],
)
def test_smallest_cpu_limit_counts(
    machine: int, affinity: int, quota: float | None, count: int
) -> None:
    assert CpuLimits(machine, affinity, quota).count == count


def test_affinity_and_quota_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    allowed = os.sched_getaffinity(0)
    assert 1 <= available_cpus() <= len(allowed)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    assert available_cpus() == 1


@pytest.mark.parametrize(
    ("environ", "binds"),
    [
        ({}, False),
        ({"OMP_PROC_BIND": "true"}, True),
        ({"OMP_PLACES": "cores"}, True),
        ({"GOMP_CPU_AFFINITY": "0-3"}, True),
        ({"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "cores"}, False),
        ({"OMP_PROC_BIND": "", "OMP_PLACES": ""}, False),
    ],
)
def test_variables_that_make_openmp_bind_threads(environ: Mapping[str, str], binds: bool) -> None:
    assert openmp_binds(environ) is binds


@pytest.mark.long
@pytest.mark.parametrize("bound", [{"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "cores"}])
def test_openmp_binding_does_not_hide_cores(bound: Mapping[str, str]) -> None:
    """When torch is loaded, libgomp binds the first thread to one place."""
    code = """
from batchinfer.process.cpus import cpu_limits
before = cpu_limits().affinity
import torch
assert cpu_limits().affinity == before >= torch.get_num_threads()
"""
    subprocess.run([sys.executable, "-c", code], env=os.environ | bound, check=True)
