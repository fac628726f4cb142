"""Activations of heads and of Dense layers, over one hidden state."""

from __future__ import annotations

import math

import numpy as np

from batchinfer.pooling.tensors import Float32


def gelu(values: Float32) -> Float32:
    """GELU by the error function (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    errors = np.array([math.erf(value) for value in values / math.sqrt(2)])
    result: Float32 = (values * 0.5 * (1 + errors)).astype(np.float32)
    return result


def relu(values: Float32) -> Float32:
    """float32 [H], what is negative 0."""
    result: Float32 = np.maximum(values, 0)
    return result


def sigmoid(values: Float32) -> Float32:
    """float32 [H] to float32 [H], each between 0 and 1."""
    tanh = np.tanh(values.astype(np.float64) / 2)  # without the overflow of exp
    return ((1 + tanh) / 2).astype(np.float32)


def silu(values: Float32) -> Float32:
    """SiLU (Elfwing et al. 2017, arXiv:1702.03118)."""
    return values * sigmoid(values)


def softmax(values: Float32) -> Float32:
    """float32 [L] to float32 [L] that come to 1."""
    powers = np.exp(values.astype(np.float64) - values.max())
    shares: Float32 = (powers / powers.sum()).astype(np.float32)
    return shares
