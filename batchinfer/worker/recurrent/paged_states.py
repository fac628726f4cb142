"""Provides the kernels of recurrent layers with the states of the current step's sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from batchinfer.engine.kv.state_layout import StateLayout
from batchinfer.kernels.cpu.recurrent_state import supports
from batchinfer.kernels.recurrent_state import PagedStates, StatePlaces
from batchinfer.worker.attention.attention import current_context
from batchinfer.worker.attention.cuda import CudaAttention

Kernel = Callable[..., None]


def choose_kernel(
    like: torch.Tensor, conv_width: int, *, triton: Kernel, native: Kernel, reference: Kernel
) -> Kernel:
    """Return the kernel for the dtype and device of ``like`` and the width of the layer's
    convolution. Return the reference if no kernel supports them."""
    if like.is_cuda:
        return triton
    return native if supports(like.dtype, conv_width) else reference


def paged_states(layer: int, *, has_scan: bool = False) -> PagedStates:
    """Return the states of the current step's sequences in ``layer``.

    Args:
        has_scan: True if the layer has a chunked scan on a CUDA device.
    """
    context = current_context()
    layout = context.cache.layout.state
    assert layout is not None
    backend, scan_work = context.backend, None
    if has_scan and isinstance(backend, CudaAttention):
        scan_work = backend.scan_work()
    return PagedStates(
        slots=context.cache.states,
        places=places_of(layout, layout.layers.index(layer)),
        tables=context.tensors["state_tables"],
        query_starts=context.tensors["query_starts"],
        context_lens=context.tensors["context_lens"],
        scan_work=scan_work,
    )


@functools.cache
def places_of(layout: StateLayout, number: int) -> StatePlaces:
    """Return where slots hold the state of recurrent layer ``number`` (0, 1, ... among recurrent
    layers)."""
    shape, matrices, convolutions = layout.shape, layout.matrices, layout.convolutions
    return StatePlaces(
        columns=matrices.piece_elements // shape.key_width,
        per_slot=matrices.per_slot(layout.slot_bytes),
        first=number * matrices.num_pieces,
        channels=convolutions.piece_elements // (shape.conv_width - 1),
        conv_per_slot=convolutions.per_slot(layout.slot_bytes),
        conv_first=number * convolutions.num_pieces,
        conv_slot=layout.first_conv_slot,
    )
