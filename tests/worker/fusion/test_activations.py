"""Activations in C equal torch's, and their bits depend on nothing but the element."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from batchinfer.kernels.cpu import encoder_layers
from batchinfer.worker.fusion.activations import NativeActivation, replace_activations

NAMES = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu", "swish")

pytestmark = pytest.mark.skipif(
    not encoder_layers.supports(torch.float32), reason="needs a C compiler"
)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def native(module: nn.Module) -> nn.Module:
    model = nn.Sequential(module)
    replace_activations(model, torch.float32)
    return model[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_activations_equal_torch(name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-12, 12, 1003).to(dtype)
    x = torch.cat([x, torch.tensor([-1e4, 1e4, 0.0]).to(dtype)])
    activation = native(ACT2FN[name])
    assert isinstance(activation, NativeActivation)
    expected = ACT2FN[name](x.double())
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(activation(x).double(), expected, rtol=tolerance, atol=tolerance)


def test_strided_rows_and_other_modules_are_kept() -> None:
    x = torch.randn(6, 10).T[::2]
    torch.testing.assert_close(native(nn.GELU())(x), nn.functional.gelu(x))
    assert isinstance(native(nn.ReLU()), nn.ReLU)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", NAMES)
def test_bits_depend_neither_on_threads_nor_on_other_rows(name: str) -> None:
    """torch's SiLU and GELU differ here: 3,420 is no multiple of their vectors' width."""
    torch.manual_seed(0)
    rows, activation = 2 * torch.randn(12, 3420), native(ACT2FN[name])
    torch.set_num_threads(1)
    expected = activation(rows)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(activation(rows), expected)
        assert torch.equal(activation(rows[5:8]), expected[5:8])
