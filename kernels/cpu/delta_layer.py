"""Runs a decoder layer with Gated DeltaNet in one call to the C kernels."""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.compiled_library import INT32, INT64, POINTER, SUFFIX, load
from batchinfer.kernels.cpu.gated_delta import GatedDeltaArgs
from batchinfer.kernels.cpu.gemm import GemmArgs
from batchinfer.kernels.cpu.row_ops import RMSNormArgs, SiluMulArgs


class DeltaLayerArgs(ctypes.Structure):
    """Arguments of a layer's parts, in the order in which they run.

    The GEMMs ``out`` and ``down`` add to the hidden state that the norms read.
    """

    _fields_ = (
        ("mixer_norm", RMSNormArgs),
        ("in", GemmArgs),
        ("delta", GatedDeltaArgs),
        ("out", GemmArgs),
        ("mlp_norm", RMSNormArgs),
        ("gate_up", GemmArgs),
        ("silu", SiluMulArgs),
        ("down", GemmArgs),
    )


class DeltaStepArgs(ctypes.Structure):
    """The C function copies these arguments of a step into the arguments of every layer."""

    _fields_ = (
        *((name, POINTER) for name in ("hidden", "tables", "query_starts", "context_lens")),
        *((name, INT64) for name in ("table_width", "num_sequences")),
        *((name, INT32) for name in ("num_tokens", "num_threads")),
    )


def delta_layer(layer: DeltaLayerArgs, step: DeltaStepArgs, dtype: torch.dtype) -> None:
    """Run a layer. All tensors have ``dtype``, except float32 buffers and states."""
    function = getattr(load(), f"delta_layer_{SUFFIX[dtype]}")
    if function(ctypes.byref(layer), ctypes.byref(step)):
        raise MemoryError("not enough memory for the workspace of a decoder layer")
