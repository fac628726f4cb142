"""Arguments that all C kernels of recurrent layers share."""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.compiled_library import INT64, POINTER, SUFFIX, load
from batchinfer.kernels.recurrent_state import PagedStates

MAX_CONV_WIDTH = 16


def supports(dtype: torch.dtype, conv_width: int = 1) -> bool:
    """Return true if the C kernels can be compiled and support ``dtype`` and the convolution's
    width."""
    return dtype in SUFFIX and conv_width <= MAX_CONV_WIDTH and load() is not None


class StateArgs(ctypes.Structure):
    """The struct ``paged_states`` in recurrent_state.h."""

    _fields_ = (
        *((name, POINTER) for name in ("slots", "tables", "query_starts", "context_lens")),
        *((name, INT64) for name in ("slot_stride", "table_width", "num_sequences")),
        *((name, INT64) for name in ("columns", "per_slot", "first")),
        *((name, INT64) for name in ("channels", "conv_per_slot", "conv_first", "conv_slot")),
    )

    @classmethod
    def of(cls, states: PagedStates) -> StateArgs:
        """Return the arguments for a layer's states. The arguments do not keep the tensors
        alive."""
        places = states.places
        tensors = states.slots, states.tables, states.query_starts, states.context_lens
        return cls(
            *(tensor.data_ptr() for tensor in tensors),
            *(states.slots.stride(0), states.tables.shape[1], len(states.context_lens)),
            *(places.columns, places.per_slot, places.first),
            *(places.channels, places.conv_per_slot, places.conv_first, places.conv_slot),
        )


class ConvolutionArgs(ctypes.Structure):
    """The struct ``convolution`` in recurrent_state.h."""

    _fields_ = (
        *((name, POINTER) for name in ("input", "weight", "bias", "output")),
        *((name, INT64) for name in ("input_stride", "num_channels", "width")),
    )

    @classmethod
    def of(
        cls,
        inputs: torch.Tensor,  # [T, channels], last dimension contiguous
        weight: torch.Tensor,  # [conv_width, channels] float32
        bias: torch.Tensor | None,  # [channels] float32
        output: torch.Tensor | None,  # [T, channels] float32; None if `gating` has the output
    ) -> ConvolutionArgs:
        """Return the arguments of a convolution. The arguments do not keep the tensors alive."""
        conv_width, num_channels = weight.shape
        assert conv_width <= MAX_CONV_WIDTH
        return cls(
            *(inputs.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr()),
            *(None if output is None else output.data_ptr(), inputs.stride(0)),
            *(num_channels, conv_width),
        )


def workspace(num_tokens: int, *widths: int) -> list[torch.Tensor]:
    """Return uninitialized float32 tensors [num_tokens, width], one for each width."""
    return [torch.empty(num_tokens, width, dtype=torch.float32) for width in widths]
