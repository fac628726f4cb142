"""Inputs and checks of encoder layers in C, with a float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, linear, relu, softmax

from batchinfer.kernels.cpu import gemm
from batchinfer.kernels.cpu.encoder_layers import (
    EncoderLayerArgs,
    array_of_layers,
    encoder_layers,
    layer_norm_args,
    product_args,
)
from tests.kernels.cases import Case

_EPS = 0.1  # large enough to affect the results
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
_ACTIVATIONS = {"gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh"), "relu": relu}


@dataclass(frozen=True)
class EncoderCase(Case):
    """Shapes of layers, and lengths of a step's sequences."""

    heads: int
    head_width: int
    width: int
    inner: int
    lengths: tuple[int, ...]
    activation: str = "gelu"
    num_layers: int = 2
    up_std: float = 1.0
    """Standard deviation of the weights of `up`, which scales the inputs of the activation."""


ENCODER_CASES = [
    EncoderCase("one token", 4, 8, 32, 48, (1,)),
    EncoderCase("short", 4, 8, 32, 48, (7, 1, 3, 2), "gelu_tanh"),
    EncoderCase("no whole vectors", 2, 18, 36, 50, (40, 17), "relu"),
    EncoderCase("odd head", 2, 17, 34, 66, (21, 5)),
    EncoderCase("heads unlike the width", 3, 32, 64, 32, (50, 49, 48)),
    EncoderCase("long", 1, 64, 64, 80, (131,)),
    EncoderCase("many tasks", 2, 16, 32, 48, (30,) * 18 + (9,) * 20, "gelu_tanh"),
    EncoderCase("longest last", 2, 16, 32, 48, (3, 1, 100)),
    EncoderCase("wide gelu", 4, 8, 32, 48, (20,), up_std=5.0),
    EncoderCase("wide gelu_tanh", 4, 8, 32, 48, (20,), "gelu_tanh", up_std=5.0),
    EncoderCase("crowded rows, narrow inside", 2, 8, 1024, 32, (1,) * 40, num_layers=1),
    EncoderCase("crowded rows", 2, 64, 1024, 2048, (9, 8), num_layers=1),
]


class EncoderLayers:
    """Random layers of a case.

    Args:
        dtype: dtype of weights and hidden states.
        pack: function that packs a weight.
    """

    def __init__(
        self,
        case: EncoderCase,
        dtype: torch.dtype,
        pack: Callable[[torch.Tensor], torch.Tensor] = gemm.pack,
    ) -> None:
        self.case, self._dtype = case, dtype
        self._draw = torch.Generator().manual_seed(0)
        width, attended = case.width, case.heads * case.head_width
        shapes = (3 * attended, width), (width, attended), (case.inner, width), (width, case.inner)
        spreads = 1.0, 1.0, case.up_std, 1.0
        self._layers = [
            {
                "products": [
                    (self._normal(*s, std=std * s[1] ** -0.5), self._normal(s[0]))
                    for s, std in zip(shapes, spreads, strict=True)
                ],
                "norms": [
                    (1 + self._normal(width, std=0.1), self._normal(width)) for _ in range(2)
                ],
            }
            for _ in range(case.num_layers)
        ]
        packed = [[pack(w) for w, _ in layer["products"]] for layer in self._layers]
        self._kept = packed
        self._arguments = array_of_layers(
            [self._arguments_of(*each) for each in zip(self._layers, packed, strict=True)]
        )
        self.hidden = self._normal(sum(case.lengths), width)

    def run(self, hidden: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """Return hidden states [T, width] as the C function computes them."""
        case, hidden = self.case, hidden.clone()
        qkv = torch.full((len(hidden), 3 * case.heads * case.head_width), torch.nan).to(self._dtype)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        encoder_layers(
            *(self._arguments, hidden, qkv, starts),
            num_heads=case.heads,
            activation=case.activation,
            scale=case.head_width**-0.5,
        )
        return hidden

    def expected(self) -> torch.Tensor:
        """Return the same hidden states computed in float64."""
        return torch.cat([self._expected(x.double()) for x in self.hidden.split(self.case.lengths)])

    def _expected(self, x: torch.Tensor) -> torch.Tensor:
        case = self.case
        for layer in self._layers:
            qkv, o, up, down = [(w.double(), b.double()) for w, b in layer["products"]]
            first, second = [(w.double(), b.double()) for w, b in layer["norms"]]
            q, k, v = linear(x, *qkv).view(len(x), 3, case.heads, -1).permute(1, 2, 0, 3)
            weights = softmax(q @ k.mT * case.head_width**-0.5, -1)
            attended = (weights @ v).transpose(0, 1).reshape(len(x), -1)
            x = layer_norm(x + linear(attended, *o), (case.width,), *first, eps=_EPS)
            between = _ACTIVATIONS[case.activation](linear(x, *up))
            x = layer_norm(x + linear(between, *down), (case.width,), *second, eps=_EPS)
        return x

    def _normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._draw) * std).to(self._dtype)

    def _arguments_of(self, layer: dict[str, list], packed: list[torch.Tensor]) -> EncoderLayerArgs:
        qkv, o, up, down = [
            product_args(each, bias, weight.shape[1], weight.shape[0], adds=at in (1, 3))
            for at, (each, (weight, bias)) in enumerate(zip(packed, layer["products"], strict=True))
        ]
        first, second = [layer_norm_args(*norm, _EPS) for norm in layer["norms"]]
        return EncoderLayerArgs(qkv, o, first, up, down, second)


def check_encoder_layers(case: EncoderCase, dtype: torch.dtype) -> None:
    """Compare with float64, up to rounding."""
    layers = EncoderLayers(case, dtype)
    got, expected = layers.run(layers.hidden, case.lengths), layers.expected()
    assert (got - expected).norm() < _TOLERANCE[dtype] * expected.norm()


def check_bits_of_a_sequence(
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    pack: Callable[[torch.Tensor], torch.Tensor] = gemm.pack,
) -> None:
    """Check that a sequence has the same bits alone and with others, on 1 and on 3 threads."""
    case = EncoderCase("", 2, 16, 32, 48, (60, *(30,) * 18, *(9,) * 20))
    layers = EncoderLayers(case, dtype, pack)
    together = layers.run(layers.hidden, case.lengths).split(case.lengths)
    parts = layers.hidden.split(case.lengths)
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        again = layers.run(layers.hidden, case.lengths)
        assert torch.equal(again, torch.cat(together))
        for at in (0, 1, 38):
            alone = layers.run(parts[at], (case.lengths[at],))
            assert torch.equal(alone, together[at])
        few = layers.run(torch.cat(parts[16:21]), case.lengths[16:21])
        assert torch.equal(few, torch.cat(together[16:21]))
