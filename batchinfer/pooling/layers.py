"""Layers of heads and embedding models, which compute one hidden state at a time in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from batchinfer.pooling.read_safetensors import Float32

Layer = Callable[[Float32], Float32]
"""Function from float32 [H] to float32 [D]."""


@dataclass(frozen=True, slots=True)
class Dense:
    weight: Float32  # [D, H]
    bias: Float32  # [D]
    activation: Layer

    @property
    def width(self) -> int:
        """Size D of the output."""
        return len(self.bias)

    def __call__(self, values: Float32) -> Float32:
        """Map float32 [H] to float32 [D]."""
        return self.activation(self.weight @ values + self.bias)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm (Ba et al. 2016, arXiv:1607.06450)."""

    weight: Float32  # [H]
    bias: Float32  # [H]
    eps: float

    def __call__(self, values: Float32) -> Float32:
        """Map float32 [H] to float32 [H]."""
        centered = values - values.mean()
        deviation = np.sqrt(np.square(centered).mean() + np.float32(self.eps))
        result: Float32 = centered / deviation * self.weight + self.bias
        return result


def identity(values: Float32) -> Float32:
    return values


def gelu(values: Float32) -> Float32:
    """Return the exact GELU of ``values`` (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    errors = np.array([math.erf(value) for value in values / math.sqrt(2)])
    result: Float32 = (values * 0.5 * (1 + errors)).astype(np.float32)
    return result


def relu(values: Float32) -> Float32:
    """Return ``values`` with 0 in place of negative numbers."""
    result: Float32 = np.maximum(values, 0)
    return result


def sigmoid(values: Float32) -> Float32:
    """Return the logistic function of ``values``, float32 [H]."""
    tanh = np.tanh(values.astype(np.float64) / 2)  # unlike exp, does not overflow
    return ((1 + tanh) / 2).astype(np.float32)


def silu(values: Float32) -> Float32:
    """Return the SiLU of ``values`` (Elfwing et al. 2017, arXiv:1702.03118)."""
    return values * sigmoid(values)


def softmax(values: Float32) -> Float32:
    """Return the softmax of ``values``, float32 [L], which sums to 1."""
    powers = np.exp(values.astype(np.float64) - values.max())
    shares: Float32 = (powers / powers.sum()).astype(np.float32)
    return shares
