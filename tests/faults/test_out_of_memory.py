"""Jobs with a real model, some of whose steps run out of memory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from batchinfer.config import SamplingParams
from batchinfer.errors import DeviceError, ExitCode
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.kernels.cpu import gemm
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.kernels.cpu import sampling as native_sampling
from batchinfer.llm import LLM
from batchinfer.worker.fusion import native_layers
from batchinfer.worker.model_runner import ModelRunner
from tests.faults.allocator import TORCH_SAYS, Allocator
from tests.job.datasets import write_parquet

NUM_ROWS = 12
MOST = 64
"""Largest number of tokens in a step."""


def job(path: Path, model: Path, name: str) -> JobSpec:
    prompts = [f"What all begin with, then {row * 37 % 101}" for row in range(NUM_ROWS)]
    write_parquet(path / "in" / "x.parquet", {"prompt": prompts})
    fields = {
        "model": {"name": str(model)},
        "input": {"path": str(path / "in")},
        "prompt": {"column": "prompt", "chat_template": "none"},
        "sampling": {"max_tokens": 6, "temperature": 1.0, "n": 2, "seed": 3},
        "engine": {"num_kv_blocks": 60, "max_num_batched_tokens": MOST, "device": "cpu"},
        "output": {"path": str(path / name), "include": ["token_ids"]},
    }
    return JobSpec.model_validate(fields)


def rows_of(spec: JobSpec) -> list[dict[str, Any]]:
    return pq.read_table(sorted(Path(spec.output.path, "data").iterdir())).to_pylist()


def summary_of(spec: JobSpec) -> dict[str, Any]:
    return json.loads(Path(spec.output.path, "summary.json").read_bytes())


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    monkeypatch.setattr(ModelRunner, "_start", ModelRunner._start)  # undone after the test
    made = Allocator()
    made.watch_steps()
    return made


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[dict[str, Any]]:
    spec = job(tmp_path_factory.mktemp("unbroken"), model, "out")
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert summary_of(spec)["out_of_memory"] == {"count": 0, "max_num_batched_tokens": None}
    return rows_of(spec)


def test_text_is_the_same_wherever_memory_runs_out(
    tmp_path: Path, model: Path, unbroken: list[dict[str, Any]], allocator: Allocator
) -> None:
    assert run_job(job(tmp_path, model, "counting"), quiet=True) is ExitCode.OK
    assert allocator.count > 300
    for place, at in enumerate(np.linspace(0, allocator.count * 0.9, 12).astype(int).tolist()):
        allocator.count, allocator.fails_at = 0, {at, at + 40}
        spec = job(tmp_path, model, f"out-{place}")
        assert run_job(spec, quiet=True) is ExitCode.OK
        assert rows_of(spec) == unbroken
        assert summary_of(spec)["out_of_memory"] == {
            "count": 2,
            "max_num_batched_tokens": MOST // 4,
        }
        log = next(Path(spec.output.path, "_batchinfer", "logs").iterdir()).read_text()
        assert log.count(f"out of memory: {TORCH_SAYS}") == 2


def failing(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Wrap the function so that call number ``at`` runs out of memory after its work."""
    calls = iter(range(1_000_000))

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if next(calls) == at:
            raise MemoryError("no memory for the workspace")
        return result

    return call


_FAILURES = {
    "layer": (native_layers, "decoder_layers", (0, 1, 4)),
    "attention": (cpu_attention, "attention_args", (0, 1, 2)),  # one call per layer
    "sampling": (native_sampling, "draw", (0, 1, 4)),
}


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        pytest.param(module, name, call, id=f"{kind}-{call}")
        for kind, (module, name, calls) in _FAILURES.items()
        for call in calls
    ],
)
def test_a_c_kernel_without_memory_is_no_worse(
    tmp_path: Path,
    model: Path,
    unbroken: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    call: int,
) -> None:
    spec = job(tmp_path, model, "out")
    start = ModelRunner._start
    broken = failing(getattr(module, name), call)

    def starts(self: ModelRunner, step: Any) -> Any:
        with monkeypatch.context() as patch:  # loading and its checks need the original
            patch.setattr(module, name, broken)
            return start(self, step)

    monkeypatch.setattr(ModelRunner, "_start", starts)
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert rows_of(spec) == unbroken
    assert summary_of(spec)["out_of_memory"]["count"] == 1


def test_smaller_steps_ask_for_less(
    tmp_path: Path, model: Path, unbroken: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers' workspace must shrink again after the largest step."""
    padded_rows, start = gemm.padded_rows, ModelRunner._start

    def allocate(num_rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
        if num_rows > MOST // 4:
            raise RuntimeError(TORCH_SAYS)
        return padded_rows(num_rows, width, like)

    def starts(self: ModelRunner, step: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(gemm, "padded_rows", allocate)
            return start(self, step)

    monkeypatch.setattr(ModelRunner, "_start", starts)
    spec = job(tmp_path, model, "out")
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert rows_of(spec) == unbroken
    assert summary_of(spec)["out_of_memory"]["max_num_batched_tokens"] == MOST // 4


def test_without_memory_for_the_smallest_step_it_is_exit_6_and_can_go_on(
    tmp_path: Path, model: Path, unbroken: list[dict[str, Any]], allocator: Allocator
) -> None:
    spec = job(tmp_path, model, "out")
    allocator.fails_at = range(200, 1_000_000)
    with pytest.raises(DeviceError, match="too little memory for the smallest step") as raised:
        run_job(spec, quiet=True)
    assert raised.value.exit_code is ExitCode.DEVICE
    assert "engine.max_num_batched_tokens: 1" in str(raised.value)
    assert "lower engine.kv_cache_memory" in str(raised.value)
    allocator.fails_at = ()
    assert run_job(spec) is ExitCode.OK
    assert rows_of(spec) == unbroken
    assert summary_of(spec)["out_of_memory"] == {"count": 6, "max_num_batched_tokens": 1}


def test_the_api_continues_with_smaller_steps_and_logs_it(
    model: Path, allocator: Allocator, caplog: pytest.LogCaptureFixture
) -> None:
    # An earlier `run --quiet` in this process may have changed the level.
    caplog.set_level(logging.WARNING, "batchinfer")
    llm = LLM(str(model), device="cpu", num_kv_blocks=60)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=1)
    before = [done.outputs[0].token_ids for done in llm.generate(["one", "two"], params)]
    allocator.fails_at = {allocator.count + 50}
    after = [done.outputs[0].token_ids for done in llm.generate(["one", "two"], params)]
    assert after == before
    assert "out of memory: Default" in caplog.text
