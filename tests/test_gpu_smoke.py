"""The smoke test of first light and `make gpu` finds what it looks for, in the interpreter."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_environment  # noqa: E402
import gpu_smoke  # noqa: E402
from gpu_interpreted import interpreted  # noqa: E402
from gpu_models import Ready  # noqa: E402
from gpu_results import Results  # noqa: E402

from batchinfer.kernels import rms_norm, rotary_write, sample, shared_attention  # noqa: E402
from batchinfer.worker.cuda_graphs.step_graphs import StepGraphs  # noqa: E402
from batchinfer.worker.fusion.fused_modules import FusedGatedMLP  # noqa: E402
from tests.kernels import cases  # noqa: E402

CPU = torch.device("cpu")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(scope="module")
def built() -> Iterator[Ready]:
    """An engine on which the steps are compared."""
    found: list[Ready] = []
    with interpreted():
        gpu_smoke._start(found, CPU, few=True)
        yield found[0]


@pytest.fixture(autouse=True)
def on_the_interpreter(built: Ready) -> None:
    """Keep ``interpreted()`` active."""


def test_every_kernel_and_step_is_right(built: Ready) -> None:
    for check in gpu_smoke._kernels(CPU, few=True).values():
        check()
    for steps in gpu_smoke._FEW_STEPS.values():
        assert gpu_smoke._compare(built, steps)["ok"]
    assert built.facts["ok"]


@pytest.mark.parametrize(
    ("module", "kernel", "checks"),
    [
        (rms_norm, "rms_norm", ["norms"]),
        (rotary_write, "rotary_write", ["norms"]),
        (cases, "paged_attention", ["attention", "shared prefix"]),
        (sample, "sample", ["sampling"]),
    ],
    ids=["norm", "rotary", "attention", "sampling"],
)
def test_a_wrong_kernel_is_found(
    module: Any, kernel: str, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(module, kernel)

    def wrong(*args: Any, **arguments: Any) -> None:
        right(*args, **arguments)
        for name in ("out", "qkv", "token_ids"):
            if name in arguments:
                arguments[name].view(-1)[-1] += 1

    monkeypatch.setattr(module, kernel, wrong)
    for name, check in gpu_smoke._kernels(CPU, few=True).items():
        if name.startswith(tuple(checks)):
            with pytest.raises(AssertionError):
                check()


def test_the_shared_kernel_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[object] = []
    kernel = shared_attention._shared_kernel
    run = type(kernel).run
    monkeypatch.setattr(
        type(kernel), "run", lambda self, *a, **k: (launches.append(self), run(self, *a, **k))[1]
    )
    for name, check in gpu_smoke._kernels(CPU, few=True).items():
        if name.startswith("shared prefix"):
            launches.clear()
            check()
            assert kernel in launches, name


def wrong_logits(built: Ready, results: tuple[torch.Tensor, ...]) -> None:
    results[0][0, 0] += 1


def wrong_pool(built: Ready, results: tuple[torch.Tensor, ...]) -> None:
    built.cache.pool.mul_(1.01)


def writes_elsewhere(built: Ready, results: tuple[torch.Tensor, ...]) -> None:
    built.cache.pool[built.cache.pool.isnan()] = 0


@pytest.mark.parametrize("harm", [wrong_logits, wrong_pool, writes_elsewhere])
def test_a_graph_that_computes_something_else_is_found(
    built: Ready, harm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, replay in built.graphs._replays.items():

        def harmful(replay: Any = replay) -> tuple[torch.Tensor, ...]:
            results: tuple[torch.Tensor, ...] = replay()
            harm(built, results)
            return results

        monkeypatch.setitem(built.graphs._replays, size, harmful)
    for steps in gpu_smoke._FEW_STEPS.values():
        assert not gpu_smoke._compare(built, steps)["ok"]


def test_graphs_of_a_large_pool_are_compared_in_the_slots_of_the_step(
    built: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_smoke, "_MOST_CLONED_BYTES", 0)
    assert gpu_smoke.compare_graphs(built, dry_run=True) == {"ok": True, "steps": 3}
    assert (built.cache.pool == 0).all()
    monkeypatch.setattr(StepGraphs, "logits", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gpu_smoke.compare_graphs(built, dry_run=True)
    assert (built.cache.pool == 0).all()
    monkeypatch.setattr(StepGraphs, "logits", lambda self, step, size: torch.zeros(1))
    found = gpu_smoke.compare_graphs(built, dry_run=True)
    assert not found["ok"]
    assert set(found) == {"ok", "steps", *gpu_smoke._FEW_STEPS}


def test_a_module_that_is_not_fused_or_a_graph_that_is_lost_is_a_failure(
    built: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not replace(built, fused_layers=built.layers - 1).facts["ok"]
    monkeypatch.setattr(StepGraphs, "num_captured", len(built.graphs.sizes) - 1)
    assert not built.facts["ok"]
    monkeypatch.setattr(FusedGatedMLP, "forward", lambda *_: 1 / 0)
    results, found = Results(tmp_path), []
    results.measure("smoke", "start", lambda: gpu_smoke._start(found, CPU, few=True))
    assert results.read()["smoke"]["start"]["fused_layers"] == 0
    assert not results.read()["smoke"]["start"]["ok"]


def test_a_machine_without_a_device_or_a_compiler_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    results = Results(tmp_path)
    gpu_environment.environment(results, dry_run=torch.cuda.is_available())
    found = results.read()["environment"]
    assert not found["machine"]["ok"]
    assert "nvidia_smi" in found["machine"]
    if not torch.cuda.is_available():
        assert found["device"]["error"] == "torch finds no CUDA device"
