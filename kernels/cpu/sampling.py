"""Calls the C kernels that draw tokens from logits."""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.compiled_library import INT32, INT64, POINTER, load


class _DrawArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("logits", "rows", "maximum", "temperature", "min_p")),
        *((name, POINTER) for name in ("top_p", "top_k", "starts", "bits", "token_ids")),
        *((name, INT64) for name in ("num_distributions", "row_stride", "vocab")),
        *((name, INT32) for name in ("num_threads", "is_bf16")),
    )


class _RandomArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("seed", "stream", "sample_index", "position", "bits")),
        ("count", INT64),
    )


def draw_bytes(vocab: int) -> int:
    """Return the size in bytes of ``draw``'s workspace, in which each thread has a weight, a key
    and a logit for every token of the vocabulary."""
    return torch.get_num_threads() * vocab * 20


def draw(
    logits: torch.Tensor,  # [R, V] float32 or bfloat16, last dimension contiguous
    maximum: torch.Tensor,  # [R] float32, largest logit of each row
    *,
    rows: torch.Tensor,  # [D] int64, index of each distribution's row of logits
    temperature: torch.Tensor,  # [D] float32, above 0
    min_p: torch.Tensor,  # [D] float32
    top_p: torch.Tensor,  # [D] float32
    top_k: torch.Tensor,  # [D] int32, 0 = all
    starts: torch.Tensor,  # [D + 1] int64, index of each distribution's first sample
    bits: torch.Tensor,  # [k] int64, random integers, uniform in [0, 2**24)
    out: torch.Tensor,  # [k] int64
) -> None:
    """Draw token ids by inverse transform sampling, in the order of ids.

    No samples are written for rows whose maximum is not finite. All tensors except ``logits`` must
    be contiguous.
    """
    library = load()
    assert library is not None
    arguments = _DrawArgs(
        *(tensor.data_ptr() for tensor in (logits, rows, maximum, temperature, min_p)),
        *(tensor.data_ptr() for tensor in (top_p, top_k, starts, bits, out)),
        *(len(rows), logits.stride(0), logits.shape[1], torch.get_num_threads()),
        logits.dtype == torch.bfloat16,
    )
    if library.draw(ctypes.byref(arguments)):
        raise MemoryError("not enough memory for the workspace of sampling")


def random_bits(
    seed: torch.Tensor,  # [K] 64-bit words
    stream: torch.Tensor,  # [K] 64-bit words
    sample_index: torch.Tensor,  # [K] int32
    position: torch.Tensor,  # [K] int32
    *,
    out: torch.Tensor,  # [K] int64
) -> None:
    """Write a uniformly distributed integer in [0, 2**24) for each of K samples. All tensors must
    be contiguous.

    The reference is ``random_bits`` in ``worker/sampling/on_cpu.py``.
    """
    library = load()
    assert library is not None
    tensors = (seed, stream, sample_index, position, out)
    arguments = _RandomArgs(*(tensor.data_ptr() for tensor in tensors), len(out))
    library.random_bits(ctypes.byref(arguments))
