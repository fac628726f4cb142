"""Cores a process may use, read from made-up ``/proc`` and ``/sys`` trees."""

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

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def tree(root: Path, *, cgroup: str, mountinfo: str, files: Mapping[str, str]) -> str:
    """A root folder with what a process finds in ``/proc/self``, and a hierarchy's files."""
    files = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo, **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    return str(root)


def v1_quota(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    names = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period}
    return {f"{folder}/{name}": f"{value}\n" for name, value in names.items()}


def test_both_versions_at_once_give_the_least(tmp_path: Path) -> None:
    files = {"sys/unified/a/cpu.max": "300000 100000\n"}
    files |= v1_quota("sys/fs/cgroup/cpu,cpuacct/b", 200_000)
    mountinfo = V1 + V2.replace("/sys/fs/cgroup", "/sys/unified")
    root = tree(tmp_path, cgroup="2:cpu,cpuacct:/b\n0::/a\n", mountinfo=mountinfo, files=files)
    assert cgroup_quota(root) == 2.0


def test_cgroup_quota_in_a_container_with_its_own_namespace(
    tmp_path: Path,
) -> None:
    files = {"sys/fs/cgroup/cpu.max": "200000 100000\n"}
    assert cgroup_quota(tree(tmp_path, cgroup="0::/\n", mountinfo=V2, files=files)) == 2.0


def test_cgroup_quota_in_a_container_in_the_namespace_of_its_host(tmp_path: Path) -> None:
    """``/proc`` names the group as the host sees it, of which the mount shows the inside."""
    mountinfo = V1.replace(" / /sys", " /docker/5e1f /sys")
    files = v1_quota("sys/fs/cgroup/cpu,cpuacct", 150_000)
    files |= v1_quota("sys/fs/cgroup/cpu,cpuacct/inner", 50_000)
    for group, expected in (("", 1.5), ("/inner", 0.5)):
        cgroup = f"2:cpu,cpuacct:/docker/5e1f{group}\n"
        assert cgroup_quota(tree(tmp_path, cgroup=cgroup, mountinfo=mountinfo, files=files)) == (
            expected
        )


def test_cgroup_quota_of_a_group_outside_the_mount(tmp_path: Path) -> None:
    mountinfo = V2.replace(" / /sys", " /docker/5e1f /sys")
    files = {"sys/fs/cgroup/cpu.max": "100000 100000\n"}
    root = tree(tmp_path, cgroup="0::/../../elsewhere\n", mountinfo=mountinfo, files=files)
    assert cgroup_quota(root) == 1.0


def test_a_mount_point_may_hold_spaces(tmp_path: Path) -> None:
    mountinfo = V2.replace("/sys/fs/cgroup", r"/my\040groups")
    files = {"my groups/cpu.max": "100000 100000\n"}
    assert cgroup_quota(tree(tmp_path, cgroup="0::/\n", mountinfo=mountinfo, files=files)) == 1.0


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(str(tmp_path)) is None
    assert cpu_limits(str(tmp_path)).quota is None


@pytest.mark.parametrize(
    "text", ["", "max", "0 100000", "100000 0", "-1 100000", "1e5 100000", "²00 100", "1 2 3", "\0"]
)
def test_an_invalid_cgroup_quota_is_no_limit(text: str, tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": text}
    assert cgroup_quota(tree(tmp_path, cgroup="0::/\n", mountinfo=V2, files=files)) is None


@given(
    quotas=st.lists(
        st.none() | st.tuples(st.integers(1, 10**7), st.integers(1000, 10**6)), min_size=1
    ),
    version=st.sampled_from([1, 2]),
)
def test_the_lowest_quota_of_nested_cgroups_counts(
    quotas: list[tuple[int, int] | None], version: int
) -> None:
    point = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/cpu,cpuacct"
    files = {}
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
        mountinfo = V2 if version == 2 else V1
        root = tree(Path(folder), cgroup=cgroup, mountinfo=mountinfo, files=files)
        known = [one[0] / one[1] for one in quotas if one is not None]
        assert cgroup_quota(root) == min(known, default=None)


LINES = st.lists(
    st.sampled_from([V1, V2, MEMORY, "0::/a\n", "2:cpu,cpuacct:/a\n", "0::", "- - -", ":::\n"])
    | st.text(max_size=40)
)


@given(cgroup=LINES, mountinfo=LINES, quota=st.text(max_size=30), cut=st.integers(0, 200))
def test_malformed_files_are_no_error(
    cgroup: list[str], mountinfo: list[str], quota: str, cut: int
) -> None:
    texts = ["".join(lines).encode("utf-8", "replace") for lines in (cgroup, mountinfo, [quota])]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        names = ("proc/self/cgroup", "proc/self/mountinfo", "sys/fs/cgroup/cpu.max")
        for name, text in zip(names, texts, strict=True):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(text[: len(text) - cut])
        found = cgroup_quota(folder)
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
def test_the_smallest_limit_counts(
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
def test_openmp_binding_does_not_hide_cores(
    bound: Mapping[str, str],
) -> None:
    """libgomp binds the first thread to one place when torch is loaded."""
    code = """
from batchinfer.process.cpus import cpu_limits
before = cpu_limits().affinity
import torch
assert cpu_limits().affinity == before >= torch.get_num_threads()
"""
    subprocess.run([sys.executable, "-c", code], env=os.environ | bound, check=True)
