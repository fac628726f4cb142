"""Packed linear layers: the same product, and rows that do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchinfer.kernels.cpu import gemm
from batchinfer.worker import linear
from batchinfer.worker.linear import PackedLinear, pack_linears, packing_works

DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(not packing_works(dtype), reason="this CPU does not pack it"),
    )
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.fixture(autouse=True, params=["own", "oneDNN"])
def _packer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's kernel where the processor has it, and what takes its place elsewhere."""
    if request.param == "oneDNN":
        monkeypatch.setattr(gemm, "supports", lambda weight: False)


def layer(in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 40), (2, 5, 40), (0, 40)])
def test_the_product_is_that_of_the_layer(
    dtype: torch.dtype, bias: bool, shape: tuple[int, ...]
) -> None:
    plain = layer(40, 24, dtype, bias=bias)
    x = torch.randn(shape).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(PackedLinear(plain)(x), plain(x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 48), (768, 256), (2048, 768)])
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    packed = PackedLinear(layer(in_features, out_features, dtype, bias=True))
    x = torch.randn(300, in_features).to(dtype)
    whole = packed(x)
    for count in (1, 2, 3, 7, 8, 33, 64, 129):
        assert torch.equal(packed(x[:count]), whole[:count])
        assert torch.equal(packed(x[300 - count :]), whole[300 - count :])


def test_a_model_keeps_its_results_and_its_other_layers() -> None:
    model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 32), nn.LayerNorm(32))
    model.requires_grad_(False)
    ids = torch.arange(9)
    before = model(ids)
    pack_linears(model, torch.float32)
    assert isinstance(model[1], PackedLinear) == packing_works(torch.float32)
    torch.testing.assert_close(model(ids), before)
    assert (model[1].weight.shape, model[1].weight.dtype) == ((32, 16), torch.float32)


def test_where_packing_does_not_work_layers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packing_works", lambda dtype: False)
    model = nn.Sequential(nn.Linear(4, 4))
    pack_linears(model, torch.float32)
    assert type(model[0]) is nn.Linear
