"""A decoder layer of the Llama shape in one call, from the kernels of this folder."""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.gemm import GemmArgs
from batchinfer.kernels.cpu.library import SUFFIX, load
from batchinfer.kernels.cpu.native import AttentionArgs
from batchinfer.kernels.cpu.row_ops import RMSNormArgs, RotaryWriteArgs, SiluMulArgs


class LayerArgs(ctypes.Structure):
    """What each part is called with, in the order in which they run.

    The products ``o`` and ``down`` add onto the hidden state that the norms read.
    """

    _fields_ = (
        ("attention_norm", RMSNormArgs),
        ("qkv", GemmArgs),
        ("rotary", RotaryWriteArgs),
        ("attention", AttentionArgs),
        ("o", GemmArgs),
        ("mlp_norm", RMSNormArgs),
        ("gate_up", GemmArgs),
        ("silu", SiluMulArgs),
        ("down", GemmArgs),
    )


def supports(dtype: torch.dtype) -> bool:
    """Whether this processor has all of the kernels for ``dtype``."""
    library = load()
    return library is not None and hasattr(library, f"decoder_layer_{SUFFIX.get(dtype)}")


def decoder_layer(arguments: LayerArgs, dtype: torch.dtype) -> None:
    """Run a layer; every tensor that ``arguments`` point to is of ``dtype``."""
    if getattr(load(), f"decoder_layer_{SUFFIX[dtype]}")(ctypes.byref(arguments)):
        raise MemoryError("no memory for the workspace of paged attention")
