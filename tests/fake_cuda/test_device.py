"""The fake device refuses what a CUDA device or a CUDA graph would refuse, or compute wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.kernels.rms_norm import _rms_norm_kernel, rms_norm
from batchinfer.worker.cuda_graphs import step_graphs
from batchinfer.worker.transfer import HostCopy, to_device
from tests.fake_cuda.captures import FrozenError
from tests.fake_cuda.device import FakeCuda
from tests.fake_cuda.launches import LaunchError
from tests.fake_cuda.operations import DeviceError

WIDTH = 1024


@pytest.fixture
def rows(fake_cuda: FakeCuda) -> torch.Tensor:
    return torch.ones(4, WIDTH, dtype=torch.bfloat16, device=fake_cuda.device)


def normalize(
    rows: torch.Tensor, weight: torch.Tensor | None = None, *, num_programs: Any = 4
) -> None:
    """Launch the kernel of ``rms_norm`` without the checks of its wrapper."""
    _rms_norm_kernel[num_programs if isinstance(num_programs, tuple) else (num_programs,)](
        *(rows, rows[0] if weight is None else weight, torch.empty_like(rows)),
        *(rows.stride(0), 1e-6),
        OFFSET=0.0,
        CENTERED=False,
        WIDTH=WIDTH,
        BLOCK=WIDTH,
    )


def test_tensors_of_the_host_are_not_given_to_kernels(rows: torch.Tensor) -> None:
    with pytest.raises(LaunchError, match="_rms_norm_kernel: weight_ptr is on cpu"):
        normalize(rows, torch.ones(WIDTH, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="tensors are on several devices"):
        rms_norm(rows, torch.ones(WIDTH), eps=0.0, offset=0.0, out=rows)


@pytest.mark.parametrize("grid", [0, 2**31, (1, 2**16), (1, 1, 2**16), 4.0])
def test_grids_are_within_the_limits_of_cuda(rows: torch.Tensor, grid: Any) -> None:
    with pytest.raises(LaunchError, match="grid"):
        normalize(rows, num_programs=grid)


def test_programs_have_the_shared_memory_that_they_need(
    rows: torch.Tensor, fake_cuda: FakeCuda
) -> None:
    normalize(rows)
    (launch,) = fake_cuda.launches
    fake_cuda.shared_bytes = {launch.signature: 227 * 2**10}
    normalize(rows)
    fake_cuda.shared_bytes = {launch.signature: 227 * 2**10 + 1}
    with pytest.raises(LaunchError, match="_rms_norm_kernel: a program needs 232449 bytes of sh"):
        normalize(rows)


def test_addresses_that_are_not_aligned_need_another_kernel(
    rows: torch.Tensor, fake_cuda: FakeCuda
) -> None:
    normalize(rows[1:])
    normalize(rows.view(-1)[1:][: 2 * WIDTH].view(2, WIDTH), rows[0])
    aligned, shifted = (launch.signature for launch in fake_cuda.launches)
    assert aligned.arguments[1:] == shifted.arguments[1:]
    assert (aligned.arguments[0], shifted.arguments[0]) == (("*bf16", "D"), ("*bf16", ""))


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda rows: rows.sum().item(), "the host reads from the device"),
        (lambda rows: rows if rows.sum() > 0 else -rows, "the host reads from the device"),
        (lambda rows: rows.cpu(), "not pinned"),
        (lambda rows: torch.ones(2).to(rows.device), "not pinned"),
        (lambda rows: torch.tensor([1, 2], device=rows.device), "not pinned"),
        (lambda rows: rows[torch.tensor([1, 2])], "not pinned"),
        (lambda rows: rows.__setitem__(rows > 1, 0), "a mask's selection"),
    ],
    ids=["item", "if", "cpu", "to", "tensor", "index", "mask"],
)
def test_a_step_does_not_wait_for_the_device(
    rows: torch.Tensor, compute: Callable[[torch.Tensor], Any], reason: str, fake_cuda: FakeCuda
) -> None:
    with torch.inference_mode():
        with pytest.raises(DeviceError, match=reason):
            compute(rows)
        with fake_cuda.loading():
            compute(rows)


def test_a_step_copies_pinned_memory(rows: torch.Tensor) -> None:
    on = to_device({"ids": np.arange(3)}, rows.device)["ids"]
    assert HostCopy(on + 1).wait().tolist() == [0, 0, 0]


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    """Capture a computation, and return the function that replays its graph."""
    with torch.inference_mode():
        return step_graphs.CudaCapture()(lambda: (run(),))


def test_no_memory_is_copied_from_the_host_in_a_capture(rows: torch.Tensor) -> None:
    with pytest.raises(DeviceError, match="not pinned"):
        captured(lambda: rows[0] + torch.ones(WIDTH).to("cuda"))
    pinned = torch.empty(WIDTH, pin_memory=True)
    with pytest.raises(DeviceError, match="freeze an address of the host"):
        captured(lambda: rows[0] + pinned.to("cuda", non_blocking=True))


class Counter:
    """Values that differ from step to step."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.steps = rows, 0

    def scaled(self) -> torch.Tensor:
        self.steps += 1
        return self.rows * self.steps

    def launched(self) -> torch.Tensor:
        self.steps += 1
        normalize(self.rows, num_programs=self.steps)
        return self.rows

    def in_new_memory(self) -> torch.Tensor:
        new = self.rows.clone() if self.steps == 0 else self.kept
        self.steps, self.kept = self.steps + 1, self.rows.new_empty(self.rows.shape)
        return new + 1

    def unchanged(self) -> torch.Tensor:
        rows = self.rows * 2
        normalize(rows)
        return rows + self.rows


@pytest.mark.parametrize("method", ["scaled", "launched", "in_new_memory"])
def test_a_graph_freezes_nothing_that_differs_from_step_to_step(
    rows: torch.Tensor, method: str
) -> None:
    replay = captured(getattr(Counter(rows), method))
    with pytest.raises(FrozenError, match="a graph has frozen"):
        replay()


def test_a_graph_of_unchanged_work_is_replayed(rows: torch.Tensor, fake_cuda: FakeCuda) -> None:
    captured(Counter(rows).unchanged)()
    assert fake_cuda.num_replays == 1
