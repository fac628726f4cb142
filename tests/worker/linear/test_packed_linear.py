"""Packed linear layers compute the same products as torch, and rows do not affect each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchinfer.worker.linear.packed_linear import PackedLinear, pack_linears
from batchinfer.worker.linear_kernels import LinearKernel, linear_kernels

KERNELS = [
    pytest.param(kernel, dtype, id=f"{kernel.name} {str(dtype).removeprefix('torch.')}")
    for dtype in (torch.float32, torch.bfloat16)
    for kernel in linear_kernels(dtype)
]
every_kernel = pytest.mark.parametrize(("kernel", "dtype"), KERNELS)


def layer(in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias=bias, dtype=dtype).requires_grad_(False)


@every_kernel
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 40), (2, 5, 40), (0, 40)])
def test_the_product_equals_the_layers(
    kernel: LinearKernel, dtype: torch.dtype, bias: bool, shape: tuple[int, ...]
) -> None:
    plain = layer(40, 24, dtype, bias=bias)
    x = torch.randn(shape).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    packed = PackedLinear(plain, kernel)
    torch.testing.assert_close(packed(x), plain(x), atol=tolerance, rtol=tolerance)


@every_kernel
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 48), (768, 256), (2048, 768)])
def test_packed_linear_is_batch_invariant(
    kernel: LinearKernel, dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    """The result does not depend on the number of threads either."""
    if not kernel.is_batch_invariant:
        pytest.skip(f"{kernel.name} is not batch-invariant")
    packed = PackedLinear(layer(in_features, out_features, dtype, bias=True), kernel)
    x = torch.randn(300, in_features).to(dtype)
    whole = packed(x)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for count in (*range(1, 300, 13), 2, 3, 7, 8, 33, 64, 129, 300):
                assert torch.equal(packed(x[:count]), whole[:count])
                assert torch.equal(packed(x[300 - count :]), whole[300 - count :])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kernel", linear_kernels(torch.float32), ids=lambda kernel: kernel.name)
def test_a_model_keeps_its_results_and_its_other_layers(kernel: LinearKernel) -> None:
    model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 32), nn.LayerNorm(32))
    model.requires_grad_(False)
    ids = torch.arange(9)
    before = model(ids)
    pack_linears(model, kernel, torch.float32)
    assert isinstance(model[1], PackedLinear)
    torch.testing.assert_close(model(ids), before)
    assert (model[1].weight.shape, model[1].weight.dtype) == ((32, 16), torch.float32)


def test_layers_of_another_dtype_are_not_joined() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16))
    pack_linears(model, linear_kernels(torch.float32)[0], torch.float32)
    assert type(model[0]) is nn.Linear
