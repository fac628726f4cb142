"""Runs decoder layers with Gated DeltaNet in one call to the C kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

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
    """Arguments of a step. The C function copies them into the arguments of every layer."""

    _fields_ = (
        *((name, POINTER) for name in ("hidden", "tables", "query_starts", "context_lens")),
        *((name, INT64) for name in ("table_width", "num_sequences")),
        *((name, INT32) for name in ("num_tokens", "num_threads")),
    )


def array_of_layers(layers: Sequence[DeltaLayerArgs]) -> ctypes.Array[DeltaLayerArgs]:
    """Copy layers to an array that ``delta_layers`` takes."""
    return (DeltaLayerArgs * len(layers))(*layers)


def delta_layers(
    layers: ctypes.Array[DeltaLayerArgs], step: DeltaStepArgs, dtype: torch.dtype
) -> None:
    """Run layers one after the other. All tensors have ``dtype``."""
    function = getattr(load(), f"delta_layers_{SUFFIX[dtype]}")
    if function(layers, ctypes.byref(step), INT64(len(layers))):
        raise MemoryError("not enough memory for the workspace of decoder layers")
