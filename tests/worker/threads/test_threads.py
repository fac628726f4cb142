"""The number of threads on a CPU: which setting decides it, and which lines are logged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Thread
from typing import Any

import pytest
import torch

from batchinfer.builders import device
from batchinfer.builders.engine import build_engine
from batchinfer.config import EngineConfig, ModelConfig
from batchinfer.process.cpus import CpuLimits
from batchinfer.worker.threads.threads import (
    StepThreads,
    ThreadCount,
    ThreadedRunner,
    TorchThreads,
    choose_threads,
)
from tests.models import make_text_model

FREE = CpuLimits(machine=64, affinity=64, quota=None)
QUOTA = CpuLimits(machine=64, affinity=64, quota=1.5)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "limits", "torch_count", "environ", "line"),
    [
        (None, FREE, 64, {}, "64 threads: the cores this process may use"),
        (3, FREE, 1, {"OMP_NUM_THREADS": "2"}, "3 threads: engine.num_threads"),
        (None, FREE, 3, {"OMP_NUM_THREADS": "3,2"}, "3 threads: OMP_NUM_THREADS"),
        (None, QUOTA, 16, {"OMP_NUM_THREADS": "16"}, "16 threads: OMP_NUM_THREADS"),
        (
            None,
            FREE,
            8,
            {"OMP_NUM_THREADS": "9", "MKL_NUM_THREADS": "8"},
            "8 threads: MKL_NUM_THREADS",
        ),
        (
            None,
            FREE,
            1,
            {"OMP_NUM_THREADS": "4"},
            "1 thread: torch's current setting; OMP_NUM_THREADS is 4",
        ),
        (None, FREE, 64, {"OMP_NUM_THREADS": "many"}, "64 threads: the cores this process may use"),
        (None, FREE, 64, {"OMP_NUM_THREADS": "0"}, "64 threads: the cores this process may use"),
        (
            None,
            QUOTA,
            64,
            {},
            "2 threads: the control group's quota of 1.5 cores; the machine has 64",
        ),
        (
            None,
            CpuLimits(64, 64, 1.0),
            64,
            {},
            "1 thread: the control group's quota of 1 core; the machine has 64",
        ),
        (
            None,
            CpuLimits(64, 2, 4.0),
            2,
            {},
            "2 threads: the cores this process may use; the machine has 64",
        ),
        (None, FREE, 32, {}, "32 threads: torch's current setting; this process may use 64 cores"),
    ],
)
def test_the_chosen_thread_count_and_its_log_line(
    asked: int | None, limits: CpuLimits, torch_count: int, environ: Mapping[str, str], line: str
) -> None:
    chosen = choose_threads(asked, limits, torch_count, environ)
    assert chosen.line() == line
    assert chosen.pinned == any(name in line for name in ("num_threads", "NUM_THREADS"))


@pytest.mark.parametrize("count", [0, -1, 4097])
def test_a_number_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads is {count}; it must be 1 to 4096"):
        EngineConfig(num_threads=count)


def test_thread_counts_of_engines_are_not_taken_for_the_callers() -> None:
    torch.set_num_threads(3)
    threads = TorchThreads()
    threads.set(2)
    threads.set(1)
    assert (torch.get_num_threads(), threads.default()) == (1, 3)
    torch.set_num_threads(4)  # the caller changes the number
    assert threads.default() == 4
    threads.set(1)
    threads.set(4)
    torch.set_num_threads(1)  # the caller sets a number that an engine used before
    assert threads.default() == 1


def test_thread_counts_of_other_python_threads_are_not_taken_for_the_callers() -> None:
    torch.set_num_threads(4)
    threads, defaults = TorchThreads(), []
    threads.set(2)

    def run() -> None:
        defaults.append(threads.default())
        threads.set(1)
        defaults.append(threads.default())

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert [*defaults, threads.default()] == [4, 4, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = make_text_model(tmp_path_factory.mktemp("model"))
    return ModelConfig(str(path), dtype="float32")


def built_with(model: ModelConfig, **engine: int) -> tuple[str, str, int]:
    """Build an engine; return its log line about threads, its device, and torch's thread count."""
    lines: list[str] = []
    config = EngineConfig(device="cpu", num_kv_blocks=8, **engine)  # type: ignore[arg-type]
    built = build_engine(model, config, log=lines.append)
    return lines[0], built.device, torch.get_num_threads()


def test_each_engine_of_a_process_chooses_its_thread_count(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "cpu_limits", lambda: CpuLimits(8, 8, 3.0))
    monkeypatch.setattr(device, "TORCH_THREADS", TorchThreads())
    torch.set_num_threads(5)
    first = built_with(model)
    assert first[0].startswith("3 threads: the control group's quota of 3 cores")
    assert first[1].startswith("cpu (3 threads of ")
    assert built_with(model, num_threads=2)[0::2] == ("2 threads: engine.num_threads", 2)
    assert built_with(model) == first
    torch.set_num_threads(1)
    assert built_with(model)[0::2] == (
        "1 thread: torch's current setting; this process may use 3 cores",
        1,
    )


@pytest.mark.parametrize("kind", ["own", "torch"])
def test_only_batch_invariant_kernels_are_governed(
    model: ModelConfig, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "cpu_limits", lambda: CpuLimits(8, 8, 3.0))
    monkeypatch.setattr(device, "TORCH_THREADS", TorchThreads())
    torch.set_num_threads(3)
    config = EngineConfig(device="cpu", num_kv_blocks=8, cpu_kernels=kind)
    built = build_engine(model, config, log=lambda line: None)
    runner: Any = built.engine._runner
    assert (runner._threads.governor is not None) == (kind == "own")


@pytest.mark.parametrize(
    ("count", "governed"),
    [
        (ThreadCount(4, ""), True),
        (ThreadCount(4, "engine.num_threads", pinned=True), False),
        (ThreadCount(1, ""), False),
    ],
)
def test_a_thread_count_set_by_the_user_is_kept(count: ThreadCount, governed: bool) -> None:
    assert (StepThreads(count, governed=True).governor is not None) == governed


class Step:
    num_tokens = 7


class RecordingRunner:
    """Records torch's number of threads in each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def submit(self, step: Any) -> Any:
        self.counts.append(torch.get_num_threads())


def test_steps_use_the_engines_thread_count_in_every_python_thread() -> None:
    torch.set_num_threads(4)
    runner: Any = RecordingRunner()
    threaded: Any = ThreadedRunner(runner, StepThreads(ThreadCount(2, ""), governed=False))
    threaded.submit(Step)
    thread = Thread(target=threaded.submit, args=(Step,))
    thread.start()
    thread.join()
    torch.set_num_threads(3)
    threaded.submit(Step)
    assert runner.counts == [2, 2, 2]


def test_the_governor_chooses_the_threads_of_each_step_and_observes_its_time() -> None:
    ticks = iter(range(100))
    threads = StepThreads(ThreadCount(4, ""), governed=True, clock=lambda: float(next(ticks)))
    governor = threads.governor
    seen: list[tuple[int, float]] = []

    def observe(tokens: int, seconds: float) -> None:
        seen.append((tokens, seconds))
        governor.count = 2

    governor.observe = observe  # type: ignore[method-assign]
    runner: Any = RecordingRunner()
    threaded: Any = ThreadedRunner(runner, threads)
    for _ in range(2):
        threaded.submit(Step)
    assert seen == [(7, 1.0), (7, 1.0)]
    assert runner.counts == [4, 2]
