"""Threads are bound to cores while they compute, if there are enough cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchinfer.kernels.cpu import compiled_library
from batchinfer.worker.threads.cores import ThreadCores, choose_cores, core_siblings
from batchinfer.worker.threads.threads import StepThreads, ThreadCount

OWN: Set[int] = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
binds = pytest.mark.skipif(
    len(OWN) < 2 or compiled_library.load() is None, reason="one core, or no C compiler here"
)


@pytest.mark.parametrize(
    ("count", "own", "cores"),
    [
        (4, {4, 5, 6, 7}, [{4}, {5}, {6}, {7}]),
        (2, {4, 5, 6, 7}, [{4, 6}, {5, 7}]),
        (3, {4, 5, 6}, [{4}, {5}, {6}]),
        (2, {4, 5, 6}, [{4, 6}, {5}]),
        (3, {4, 5, 6, 7}, None),
        (1, {4, 5, 6, 7}, None),
        (5, {4, 5, 6, 7}, None),
    ],
)
def test_threads_get_their_own_cores_if_there_are_enough(
    count: int, own: Set[int], cores: list[Set[int]] | None
) -> None:
    """Each physical core here has two logical cores, whose numbers differ by 2."""
    assert choose_cores(count, own, lambda core: {core % 2 + 4, core % 2 + 6}) == cores


@pytest.mark.parametrize(
    ("text", "siblings"), [("3,19\n", {3, 19}), ("1-3,7", {1, 2, 3, 7}), ("?", {3}), (None, {3})]
)
def test_core_siblings_are_read_in_linux_format(
    text: str | None, siblings: Set[int], tmp_path: Path
) -> None:
    file = tmp_path / "cpu3" / "topology" / "thread_siblings_list"
    file.parent.mkdir(parents=True)
    if text is not None:
        file.write_text(text)
    assert core_siblings(3, str(tmp_path)) == siblings


class Team:
    """A team of threads started by a new thread, and the cores they are bound to."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._before = set(os.listdir("/proc/self/task"))
        self._cores = ThreadCores(environ)

    def bound(self, count: int) -> tuple[Set[int], list[Set[int]]]:
        """Return the cores of the starting thread and of the others, while they are bound."""
        with self._cores.bound(count):
            new = set(os.listdir("/proc/self/task")) - self._before
            others = [os.sched_getaffinity(int(thread)) for thread in new]
            return os.sched_getaffinity(0), sorted(others, key=min)


@contextmanager
def team_of_a_fresh_thread(
    environ: Mapping[str, str],
) -> Iterator[Callable[[int], tuple[Set[int], list[Set[int]]]]]:
    """Run a team in a new thread, which shares no OpenMP threads with other tests."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(threading.get_native_id).result()
        team = Team(environ)
        yield lambda count: pool.submit(team.bound, count).result()
        # Threads that the starting thread starts later may run on any of its cores.
        assert pool.submit(os.sched_getaffinity, 0).result() == OWN


@binds
def test_threads_are_bound_and_freed_when_there_are_fewer() -> None:
    most, cores = len(OWN), [{core} for core in sorted(OWN)]
    with team_of_a_fresh_thread({}) as bound:
        for _ in range(2):
            assert bound(most) == (cores[0], cores[1:])
            if choose_cores(most - 1, OWN, core_siblings) is None:
                caller, others = bound(most - 1)
                assert caller == OWN
                assert others.count(OWN) == most - 2  # one thread may be ending


@binds
@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"])
def test_openmp_variables_that_bind_threads_win(name: str) -> None:
    with team_of_a_fresh_thread({name: "false"}) as bound:
        assert bound(len(OWN)) == (OWN, [])


@binds
def test_steps_run_on_bound_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    threads = StepThreads(ThreadCount(len(OWN), ""), governed=False)

    def step() -> Set[int]:
        with threads.step(7):
            return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(step).result() == {min(OWN)}
        assert pool.submit(os.sched_getaffinity, 0).result() == OWN
