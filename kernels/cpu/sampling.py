"""Drawing tokens from logits, in C, called through ctypes."""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.library import INT32, INT64, POINTER, load


class _DrawArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("logits", "maximum", "temperature", "min_p", "top_p")),
        *((name, POINTER) for name in ("top_k", "starts", "bits", "token_ids")),
        *((name, INT64) for name in ("num_distributions", "row_stride", "vocab")),
        ("num_threads", INT32),
    )


def draw_bytes(vocab: int) -> int:
    """Bytes that ``draw`` takes for its own use: a weight and a key of each token, a thread."""
    return torch.get_num_threads() * vocab * 16


def draw(
    logits: torch.Tensor,  # [D, V] float32, last dimension contiguous
    maximum: torch.Tensor,  # [D] float32, the largest of each row
    *,
    temperature: torch.Tensor,  # [D] float32, over 0
    min_p: torch.Tensor,  # [D] float32
    top_p: torch.Tensor,  # [D] float32
    top_k: torch.Tensor,  # [D] int32, 0 = all
    starts: torch.Tensor,  # [D + 1] int64, where the samples of each distribution begin
    bits: torch.Tensor,  # [k] int64, uniform in [0, 2**24)
    out: torch.Tensor,  # [k] int64
) -> None:
    """Token ids of samples, by the inverse of the cumulative distribution in id order.

    Samples of rows whose maximum is not finite are left as they are. All tensors but ``logits``
    are contiguous.
    """
    library = load()
    assert library is not None
    arguments = _DrawArgs(
        *(tensor.data_ptr() for tensor in (logits, maximum, temperature, min_p, top_p)),
        *(tensor.data_ptr() for tensor in (top_k, starts, bits, out)),
        *(len(logits), logits.stride(0), logits.shape[1], torch.get_num_threads()),
    )
    if library.draw(ctypes.byref(arguments)):
        raise MemoryError("no memory for the workspace of sampling")
