"""Waits for the device are found before a capture, on the devices that have them."""

from __future__ import annotations

import pytest
import torch

from batchinfer.worker.cuda_graphs.sync_watch import WaitsForDeviceError, run_without_waits
from tests.fake_cuda.device import FakeCuda


@pytest.mark.parametrize(
    ("fake_cuda", "dtype", "waits"),
    [
        (90, torch.bfloat16, False),
        (100, torch.bfloat16, False),
        (90, torch.float16, True),
        (80, torch.bfloat16, True),
        (89, torch.bfloat16, True),
        (120, torch.bfloat16, True),
    ],
    indirect=["fake_cuda"],
)
def test_experts_that_torch_multiplies_one_by_one_wait(
    fake_cuda: FakeCuda, dtype: torch.dtype, waits: bool
) -> None:
    rows = torch.ones(32, 64, dtype=dtype, device=fake_cuda.device)
    experts = torch.ones(4, 64, 48, dtype=dtype, device=fake_cuda.device)
    with fake_cuda.loading():
        ends = torch.tensor([8, 16, 20, 32], dtype=torch.int32, device=fake_cuda.device)

    def multiply() -> None:
        torch.nn.functional.grouped_mm(rows, experts, offs=ends)

    with torch.inference_mode():
        if not waits:
            run_without_waits(multiply)
        else:
            with pytest.raises(WaitsForDeviceError, match="_grouped_mm"):
                run_without_waits(multiply)


def test_waits_that_torch_reports_are_found(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str | int] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def wait() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(WaitsForDeviceError, match="called a synchronizing CUDA operation"):
        run_without_waits(wait)
    assert modes == ["error", 0]
