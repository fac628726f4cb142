"""Runs encoder layers with BERT's structure in one call to the C kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from batchinfer.kernels.cpu.compiled_library import FLOAT, INT32, INT64, POINTER, SUFFIX, load
from batchinfer.kernels.cpu.gemm import GemmArgs

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "quick_gelu")
"""Activations of an MLP, at the indices that encoder_arguments.h numbers."""


class LayerNormArgs(ctypes.Structure):
    _fields_ = (("weight", POINTER), ("bias", POINTER), ("eps", FLOAT))


class EncoderLayerArgs(ctypes.Structure):
    """Arguments of a layer's parts, in the order in which they run.

    The GEMMs ``o`` and ``down`` add to the hidden state. The C function sets the number of rows and
    the addresses for each step.
    """

    _fields_ = (
        ("qkv", GemmArgs),
        ("o", GemmArgs),
        ("attention_norm", LayerNormArgs),
        ("up", GemmArgs),
        ("down", GemmArgs),
        ("mlp_norm", LayerNormArgs),
    )


class _EncoderArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("layers", "hidden", "qkv", "starts")),
        *((name, INT64) for name in ("num_layers", "num_sequences")),
        *((name, INT32) for name in ("num_heads", "head_width", "num_threads", "activation")),
        ("scale", FLOAT),
    )


class _ActivateArgs(ctypes.Structure):
    _fields_ = (
        *(("x", POINTER), ("count", INT64)),
        *(("activation", INT32), ("num_threads", INT32)),
    )


def supports(dtype: torch.dtype) -> bool:
    """Return true if the C kernels can be compiled and support ``dtype``."""
    return load() is not None and dtype in SUFFIX


def product_args(
    packed: torch.Tensor,  # packed weight [out, in]
    bias: torch.Tensor | None,  # [out]
    in_features: int,
    out_features: int,
    *,
    adds: bool = False,
) -> GemmArgs:
    """Return the arguments of a layer's GEMM, except the arguments that differ between steps. If
    ``adds``, the output is added to the hidden state."""
    return GemmArgs(
        packed=packed.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        adds=adds,
    )


def layer_norm_args(weight: torch.Tensor, bias: torch.Tensor, eps: float) -> LayerNormArgs:
    return LayerNormArgs(weight.data_ptr(), bias.data_ptr(), eps)


def array_of_layers(layers: Sequence[EncoderLayerArgs]) -> ctypes.Array[EncoderLayerArgs]:
    return (EncoderLayerArgs * len(layers))(*layers)


def activate(x: torch.Tensor, activation: str) -> None:
    """Apply an activation to a contiguous tensor, in place.

    An element's bits depend neither on the element's index nor on the number of threads.
    """
    library = load()
    assert library is not None
    arguments = _ActivateArgs(
        *(x.data_ptr(), x.numel(), ACTIVATIONS.index(activation), torch.get_num_threads())
    )
    getattr(library, f"activate_all_{SUFFIX[x.dtype]}")(ctypes.byref(arguments))


def encoder_layers(
    layers: ctypes.Array[EncoderLayerArgs],
    hidden: torch.Tensor,  # [T, width], contiguous; changed in place
    qkv: torch.Tensor,  # [T, 3 * num_heads * head_width], contiguous; workspace
    starts: torch.Tensor,  # [S + 1] int64 first token of each sequence, then T
    *,
    num_heads: int,
    activation: str,
    scale: float,
) -> None:
    """Run post-norm layers (BERT, Devlin et al. 2018) over packed sequences, in place.

    A token's bits depend only on its own sequence.
    """
    library = load()
    assert library is not None
    arguments = _EncoderArgs(
        *(ctypes.addressof(layers), hidden.data_ptr(), qkv.data_ptr(), starts.data_ptr()),
        *(len(layers), len(starts) - 1, num_heads, qkv.shape[1] // (3 * num_heads)),
        *(torch.get_num_threads(), ACTIVATIONS.index(activation), scale),
    )
    if getattr(library, f"encoder_layers_{SUFFIX[hidden.dtype]}")(ctypes.byref(arguments)):
        raise MemoryError("not enough memory for the workspace of encoder layers")
