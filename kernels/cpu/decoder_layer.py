"""Runs decoder layers with Llama's structure in one call to the C kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from batchinfer.kernels.cpu.compiled_library import INT32, INT64, POINTER, SUFFIX, load
from batchinfer.kernels.cpu.gemm import GemmArgs
from batchinfer.kernels.cpu.paged_attention import AttentionArgs
from batchinfer.kernels.cpu.row_ops import (
    RMSNormArgs,
    RotaryWriteArgs,
    SigmoidMulArgs,
    SiluMulArgs,
)


class LayerArgs(ctypes.Structure):
    """Arguments of a layer's parts, in the order in which they run.

    The GEMMs ``o`` and ``down`` add to the hidden state that the norms read.
    """

    _fields_ = (
        ("attention_norm", RMSNormArgs),
        ("qkv", GemmArgs),
        ("rotary", RotaryWriteArgs),
        ("attention", AttentionArgs),
        ("gate", SigmoidMulArgs),
        ("o", GemmArgs),
        ("mlp_norm", RMSNormArgs),
        ("gate_up", GemmArgs),
        ("silu", SiluMulArgs),
        ("down", GemmArgs),
    )


class StepArgs(ctypes.Structure):
    """The C function copies these arguments of a step into the arguments of every layer."""

    _fields_ = (
        *((name, POINTER) for name in ("hidden", "cos", "sin", "slot_mapping", "block_tables")),
        *((name, POINTER) for name in ("query_starts", "context_lens", "order", "shared_lens")),
        ("query_ends", POINTER),
        ("table_width", INT64),
        *((name, INT32) for name in ("num_tokens", "num_sequences", "num_threads")),
    )


def supports(dtype: torch.dtype) -> bool:
    """Return true if the C kernels can be compiled and support ``dtype``."""
    return load() is not None and dtype in SUFFIX


def array_of_layers(layers: Sequence[LayerArgs]) -> ctypes.Array[LayerArgs]:
    return (LayerArgs * len(layers))(*layers)


def array_of_steps(steps: Sequence[StepArgs]) -> ctypes.Array[Any]:
    """Return pointers to steps for ``decoder_layers``, which sees later changes to the steps."""
    return (ctypes.POINTER(StepArgs) * len(steps))(*map(ctypes.pointer, steps))


def decoder_layers(
    layers: ctypes.Array[LayerArgs], steps: ctypes.Array[Any], dtype: torch.dtype
) -> None:
    """Run layers one after the other. The step arguments for layer i are ``steps[i]``. All tensors
    have ``dtype``."""
    function = getattr(load(), f"decoder_layers_{SUFFIX[dtype]}")
    if function(layers, steps, INT64(len(layers))):
        raise MemoryError("not enough memory for the workspace of decoder layers")
