"""The choice of a GEMM kernel: the required one, the pinned one, or the fastest measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchinfer.builders import engine as build
from batchinfer.config import EngineConfig, ModelConfig
from batchinfer.errors import DeviceError, ModelError
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.worker.linear import kernel_choice
from batchinfer.worker.linear.batch_invariance import check_batch_invariance
from batchinfer.worker.linear.kernel_choice import (
    KernelRequirements,
    choose_cuda_kernel,
    choose_kernel,
    fastest,
)
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.loader import load_model
from tests.models import make_checkpoint
from tests.worker.batch_dependent import BATCH_DEPENDENT

F32 = torch.float32
CPU = torch.device("cpu")


def kernel(kind: str, instructions: str = "AVX2", *, keeps: bool = False) -> LinearKernel:
    return LinearKernel(kind, instructions, keeps, lambda weight: Counting(weight))


class Counting:
    """Multiplies, and counts the calls."""

    calls = 0

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.nbytes = weight, weight.nbytes

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        Counting.calls += 1
        return nn.functional.linear(rows, self.weight, bias)


OWN, OLD_OWN = kernel("own", "AVX-512", keeps=True), kernel("own", "AVX2", keeps=True)
ONEDNN, TORCH = kernel("onednn"), kernel("torch")
ALL = (OWN, OLD_OWN, ONEDNN, TORCH)
LARGE = nn.Linear(4096, 1024, device="meta")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "linear_kernels", lambda dtype: ALL)


def measured(monkeypatch: pytest.MonkeyPatch, gflops: Mapping[str, float]) -> None:
    def speeds(kernels: Any, shapes: Any, dtype: Any) -> dict[str, float]:
        return {kernel.name: gflops[kernel.name] for kernel in kernels}

    monkeypatch.setattr(kernel_choice, "time_kernels", speeds)


def test_the_fastest_kernel_is_chosen_and_speeds_are_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds = {OWN.name: 200.0, OLD_OWN.name: 100.0, ONEDNN.name: 900.0, TORCH.name: 300.0}
    measured(monkeypatch, speeds)
    choice = choose_kernel(nn.Sequential(LARGE), F32, KernelRequirements())
    assert choice.kernel is ONEDNN
    assert str(choice) == (
        "linear layers use onednn AVX2: measured (GFLOP/s of one thread: own AVX-512 200, "
        "own AVX2 100, onednn AVX2 900, torch AVX2 300); "
        "the last bits of a row may depend on other rows"
    )


@given(st.lists(st.floats(1, 1e6), min_size=4, max_size=4))
def test_the_own_kernel_is_chosen_unless_another_is_much_faster(speeds: list[float]) -> None:
    gflops = {each.name: speed for each, speed in zip(ALL, speeds, strict=True)}
    chosen = fastest(ALL, gflops)
    own, others = max(speeds[:2]), max(speeds[2:])
    if chosen.kind == "own":
        assert gflops[chosen.name] == own
        assert others <= own * 1.15 * (1 + 1e-9)
    else:
        assert gflops[chosen.name] == others > own * 1.15 * (1 - 1e-9)


def test_a_small_model_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, {})
    assert choose_kernel(nn.Sequential(nn.Linear(8, 8)), F32, KernelRequirements()).kernel is OWN


@pytest.mark.parametrize(("kind", "expected"), [("onednn", ONEDNN), ("torch", TORCH)])
def test_cpu_kernels_chooses_a_kind(kind: str, expected: LinearKernel) -> None:
    choice = choose_kernel(nn.Sequential(LARGE), F32, KernelRequirements(kind))
    assert choice.kernel is expected
    assert f"engine.cpu_kernels is {kind}" in str(choice)


def test_a_missing_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "linear_kernels", lambda dtype: (TORCH,))
    for required in (
        KernelRequirements("own"),
        KernelRequirements("onednn"),
        KernelRequirements(deterministic=True),
    ):
        with pytest.raises(DeviceError, match=r"cpu_kernels is|deterministic is true"):
            choose_kernel(nn.Sequential(LARGE), F32, required)


def test_a_deterministic_job_takes_the_first_batch_invariant_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_choice, "linear_kernels", lambda dtype: (ONEDNN, OWN, OLD_OWN))
    speeds = {OWN.name: 10.0, OLD_OWN.name: 20.0, ONEDNN.name: 900.0}
    measured(monkeypatch, speeds)
    choice = choose_kernel(nn.Sequential(LARGE), F32, KernelRequirements(deterministic=True))
    assert choice.kernel is OWN


@pytest.mark.parametrize("before", ALL, ids=lambda kernel: kernel.name)
def test_a_resumed_job_keeps_its_kernel(before: LinearKernel) -> None:
    required = KernelRequirements(pinned={"float32": before.name, "bfloat16": "own AMX"})
    choice = choose_kernel(nn.Sequential(LARGE), F32, required)
    assert (choice.kernel, choice.why) == (before, "as in earlier runs")


def test_a_missing_pinned_kernel_is_logged_or_refused_if_deterministic() -> None:
    required = KernelRequirements("onednn", pinned={"float32": "own AMX"})
    assert "earlier runs used own AMX, so bits may differ" in str(
        choose_kernel(nn.Sequential(LARGE), F32, required)
    )
    with pytest.raises(DeviceError, match="own AMX, which does not run on this machine"):
        choose_kernel(
            nn.Sequential(LARGE),
            F32,
            KernelRequirements(deterministic=True, pinned=required.pinned),
        )


@pytest.mark.parametrize("damage", [None, b"", b"[1]", b'{"own AVX2": 3}'])
def test_timings_are_cached_unless_the_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    monkeypatch.setattr(kernel_choice.compiled_library, "cache_folder", lambda: tmp_path)
    shapes = {(48, 64): 3, (64, 32): 1}
    first = kernel_choice.time_kernels(ALL, shapes, F32)
    assert set(first) == {each.name for each in ALL}
    assert all(speed > 0 for speed in first.values())
    (cached,) = tmp_path.iterdir()
    if damage is not None:
        cached.write_bytes(damage)
    calls = Counting.calls
    again = kernel_choice.time_kernels(ALL, shapes, F32)
    assert (Counting.calls > calls) == (damage is not None)
    assert damage is not None or again == first
    kernel_choice.time_kernels(ALL, {(48, 64): 4}, F32)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(not cpu_attention.supports(F32), reason="needs a C compiler")
@pytest.mark.parametrize("keeps", [True, False])
def test_batch_invariance_is_checked_on_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.undo()
    if not keeps:
        claims = replace(BATCH_DEPENDENT, is_batch_invariant=True)
        monkeypatch.setattr(kernel_choice, "linear_kernels", lambda dtype: (claims,))
    widths = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
    folder = make_checkpoint("llama", tmp_path, **widths)
    loaded = load_model(
        ModelConfig(str(folder)), device=CPU, kernels=KernelRequirements(deterministic=True)
    )
    if keeps:
        check_batch_invariance(loaded.model, loaded.layout(16))
    else:
        with pytest.raises(ModelError, match="deterministic is true, but in models of"):
            check_batch_invariance(loaded.model, loaded.layout(16))


@pytest.mark.skipif(not cpu_attention.supports(F32), reason="needs a C compiler")
def test_batch_invariance_is_checked_on_layers_with_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool has a table for each group of layers; the check's small pool has one table."""
    monkeypatch.undo()
    folder = make_checkpoint("cohere2", tmp_path)
    loaded = load_model(
        ModelConfig(str(folder)), device=CPU, kernels=KernelRequirements(deterministic=True)
    )
    assert len(loaded.layout(16).groups) > 1
    check_batch_invariance(loaded.model, loaded.layout(16))


def test_on_cuda_torch_multiplies_unless_the_job_is_deterministic() -> None:
    assert choose_cuda_kernel(CPU, torch.bfloat16, KernelRequirements()).name == "torch"
    choice = choose_cuda_kernel(CPU, torch.bfloat16, KernelRequirements(deterministic=True))
    assert choice.kernel.is_batch_invariant
    assert re.fullmatch(r"own Triton [\d.]+ sm_\d+", choice.name)
    again = KernelRequirements(deterministic=True, pinned={"bfloat16": choice.name})
    assert choose_cuda_kernel(CPU, torch.bfloat16, again).name == choice.name


def test_on_cuda_a_deterministic_job_refuses_another_kernel() -> None:
    required = KernelRequirements(deterministic=True, pinned={"bfloat16": "own Triton 3.0.0 sm_70"})
    with pytest.raises(DeviceError, match=r"computed by own Triton 3\.0\.0 sm_70"):
        choose_cuda_kernel(CPU, torch.bfloat16, required)


def test_quantized_models_are_refused_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "choose_device", lambda wanted: torch.device("cuda"))
    model = ModelConfig("any", quantization="int8_weight_only")
    with pytest.raises(ModelError, match=r"CUDA kernels of model\.quantization: int8"):
        build.build_engine(model, EngineConfig(deterministic=True), log=print)
