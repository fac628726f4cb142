"""A decoder layer of the Llama shape in one call, from the kernels of this folder."""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.gemm import GemmArgs
from batchinfer.kernels.cpu.library import INT32, INT64, POINTER, SUFFIX, load
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


class StepArgs(ctypes.Structure):
    """What ``LayerArgs`` hold of a step: the C function puts it into those of every layer."""

    _fields_ = (
        *((name, POINTER) for name in ("hidden", "cos", "sin", "slot_mapping", "block_tables")),
        *((name, POINTER) for name in ("query_starts", "context_lens", "order", "shared_lens")),
        ("table_width", INT64),
        *((name, INT32) for name in ("num_tokens", "num_sequences", "num_threads")),
    )


def supports(dtype: torch.dtype) -> bool:
    """Whether this processor has all of the kernels for ``dtype``."""
    library = load()
    return library is not None and hasattr(library, f"decoder_layer_{SUFFIX.get(dtype)}")


def decoder_layer(arguments: LayerArgs, step: StepArgs, dtype: torch.dtype) -> None:
    """Run a layer; every tensor that the arguments point to is of ``dtype``."""
    function = getattr(load(), f"decoder_layer_{SUFFIX[dtype]}")
    if function(ctypes.byref(arguments), ctypes.byref(step)):
        raise MemoryError("no memory for the workspace of paged attention")
