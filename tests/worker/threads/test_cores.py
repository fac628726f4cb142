"""Which cores threads are bound to, and that they are while they compute."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchinfer.engine.runner import Pending, Ready
from batchinfer.engine.step import Step
from batchinfer.kernels.cpu import library
from batchinfer.worker.threads.cores import ThreadCores, choose_cores, core_siblings
from batchinfer.worker.threads.governor import ThreadGovernor
from batchinfer.worker.threads.runner import GovernedThreads, PinnedThreads

OWN: Set[int] = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
binds = pytest.mark.skipif(
    len(OWN) < 2 or library.load() is None, reason="one core, or no C compiler here"
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
def test_threads_have_cores_of_their_own_where_they_are_as_many(
    count: int, own: Set[int], cores: list[Set[int]] | None
) -> None:
    """A core has two logical ones here, whose numbers are 2 apart."""
    assert choose_cores(count, own, lambda core: {core % 2 + 4, core % 2 + 6}) == cores


@pytest.mark.parametrize(
    ("text", "siblings"),
    [("3\n", {3}), ("3,19\n", {3, 19}), ("2-3\n", {2, 3}), ("1-3,7", {1, 2, 3, 7}), ("?", {3})],
)
def test_siblings_are_read_as_linux_writes_them(
    text: str, siblings: Set[int], tmp_path: Path
) -> None:
    file = tmp_path / "cpu3" / "topology" / "thread_siblings_list"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert core_siblings(3, str(tmp_path)) == siblings


def test_a_core_that_linux_says_nothing_about_is_alone(tmp_path: Path) -> None:
    assert core_siblings(3, str(tmp_path)) == {3}


class Team:
    """The threads of a team that a fresh thread begins, and what they are bound to."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._before = set(os.listdir("/proc/self/task"))
        self._cores = ThreadCores(environ)

    def bound(self, count: int) -> tuple[Set[int], list[Set[int]]]:
        """Cores of the thread that begins the team, and of the others, while they are bound."""
        with self._cores.bound(count):
            new = set(os.listdir("/proc/self/task")) - self._before
            others = [os.sched_getaffinity(int(thread)) for thread in new]
            return os.sched_getaffinity(0), sorted(others, key=min)


@contextmanager
def team_of_a_fresh_thread(
    environ: Mapping[str, str],
) -> Iterator[Callable[[int], tuple[Set[int], list[Set[int]]]]]:
    """Its runtime keeps no threads of other tests, and ends those of this one with it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(threading.get_native_id).result()
        team = Team(environ)
        yield lambda count: pool.submit(team.bound, count).result()
        assert (
            pool.submit(os.sched_getaffinity, 0).result() == OWN
        )  # what it starts may go anywhere


@binds
def test_each_thread_is_bound_and_free_again_when_they_are_fewer() -> None:
    most, cores = len(OWN), [{core} for core in sorted(OWN)]
    with team_of_a_fresh_thread({}) as bound:
        for _ in range(2):
            assert bound(most) == (cores[0], cores[1:])
            if choose_cores(most - 1, OWN, core_siblings) is None:
                caller, others = bound(most - 1)
                assert caller == OWN
                assert others.count(OWN) == most - 2  # one may be about to end


@binds
@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"])
def test_what_the_user_says_of_cores_is_kept(name: str) -> None:
    with team_of_a_fresh_thread({name: "false"}) as bound:
        assert bound(len(OWN)) == (OWN, [])


class Bound:
    """A runner that notes the cores of the thread that computes a step."""

    def __init__(self) -> None:
        self.cores: list[Set[int]] = []

    def submit(self, step: Step) -> Pending:
        self.cores.append(os.sched_getaffinity(0))
        return Ready(None)  # type: ignore[arg-type]  # nobody looks at it


class Tokens:
    """What a governor asks of a step."""

    num_tokens = 7


@binds
@pytest.mark.parametrize("is_governed", [False, True])
def test_steps_run_on_bound_threads(is_governed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    runner, count = Bound(), len(OWN)
    threads = (
        GovernedThreads(runner, ThreadGovernor(count))
        if is_governed
        else PinnedThreads(runner, count)
    )
    with ThreadPoolExecutor(1) as pool:
        pool.submit(threads.submit, Tokens()).result()  # type: ignore[arg-type]
        assert runner.cores == [{min(OWN)}]
        assert pool.submit(os.sched_getaffinity, 0).result() == OWN
