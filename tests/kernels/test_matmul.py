"""Batch-invariant matmul matches its reference, and a row's bits do not depend on other rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from batchinfer.kernels import reference
from batchinfer.kernels.matmul import matmul
from tests.kernels.cases import Case
from tests.kernels.gpu_or_interpreter import on_both
from tests.kernels.interpreted_dot import sum_rows_alike

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class MatmulCase(Case):
    rows: int
    outputs: int
    depth: int
    bias: bool = False
    adds: bool = False


CASES = (
    MatmulCase("one_row", 1, 8, 16),
    MatmulCase("odd", 131, 70, 45, bias=True, adds=True),
    MatmulCase("whole_tiles", 256, 128, 128, bias=True),
    MatmulCase("more_tiles_of_rows_than_in_a_group", 1100, 9, 20, adds=True),
)


def build(case: MatmulCase, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `matmul`, as views of larger tensors that are NaN elsewhere."""
    generator = torch.Generator().manual_seed(0)

    def inside_of_nan(rows: int, width: int) -> torch.Tensor:
        outer = torch.full((rows + 2, width + 3), float("nan"))
        inner = outer[1 : 1 + rows, :width]
        inner.copy_(torch.randn(rows, width, generator=generator))
        return outer.to(device, dtype)[1 : 1 + rows, :width]

    return {
        "x": inside_of_nan(case.rows, case.depth),
        "weight": inside_of_nan(case.outputs, case.depth),
        "bias": torch.randn(case.outputs, generator=generator).to(device, dtype)
        if case.bias
        else None,
        "out": inside_of_nan(case.rows, case.outputs),
        "adds": case.adds,
    }


@on_both()
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matmul_equals_reference(case: MatmulCase, dtype: torch.dtype, device: str) -> None:
    arguments = build(case, device, dtype)
    expected = arguments["out"].clone()
    reference.matmul(**arguments | {"out": expected})
    matmul(**arguments)
    scale = TOLERANCE[dtype]
    torch.testing.assert_close(arguments["out"], expected, rtol=scale, atol=scale * case.depth**0.5)
    outer = arguments["out"]._base
    outer[1 : 1 + case.rows, : case.outputs] = float("nan")
    assert outer.isnan().all()


def check_rows_apart(
    device: str, dtype: torch.dtype, *, rows: int, outputs: int, depth: int, counts: list[int]
) -> None:
    """Compare the last rows of a product with products of these rows alone."""
    case = MatmulCase("rows", rows, outputs, depth, bias=True)
    arguments = build(case, device, dtype)
    matmul(**arguments)
    for count in counts:
        out = arguments["out"].new_empty(count, outputs)
        matmul(**arguments | {"x": arguments["x"][rows - count :], "out": out})
        assert torch.equal(out, arguments["out"][rows - count :]), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_matmul_row_bits_do_not_depend_on_other_rows(
    dtype: torch.dtype, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sum_rows_alike(monkeypatch)
    counts = [1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 255, 299]
    check_rows_apart(interpreter, dtype, rows=300, outputs=70, depth=100, counts=counts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("outputs", [1000, 6200])
def test_matmul_row_bits_do_not_depend_on_other_rows_on_gpu(
    outputs: int, dtype: torch.dtype, gpu: str
) -> None:
    counts = [*range(1, 300), 512, 1000, 1024, 4096, 8191]
    check_rows_apart(gpu, dtype, rows=8192, outputs=outputs, depth=1000, counts=counts)
