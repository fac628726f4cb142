"""Calls the C kernels of paged attention, and reads and writes the KV pool in the kernels' layout.

Blocks of the pool store keys and values in the order in which the processor multiplies them
(``kv_block_layout.h``). Only ``kv_write`` and ``row_ops.rotary_write`` write blocks. ``read_keys``
and ``read_values`` return keys and values in the order of positions.

Without a C compiler, ``supports`` returns False and the worker uses torch operations.
"""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.compiled_library import (
    FLOAT,
    INT32,
    INT64,
    POINTER,
    SUFFIX,
    chosen,
    kernels_of,
    load,
)

_ATTEND = {torch.float32: "attend_f32", torch.bfloat16: "attend_bf16"}


class AttentionArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("query", "out", "keys", "values")),
        *((name, POINTER) for name in ("block_tables", "query_starts", "context_lens", "sinks")),
        *((name, POINTER) for name in ("order", "shared_lens", "query_ends", "prompt_lens")),
        *((name, INT64) for name in ("query_token_stride", "query_head_stride")),
        ("out_token_stride", INT64),
        *((name, INT64) for name in ("key_slot_stride", "key_head_stride")),
        *((name, INT64) for name in ("value_slot_stride", "value_head_stride", "table_width")),
        *((name, INT32) for name in ("num_sequences", "num_heads", "num_kv_heads")),
        *((name, INT32) for name in ("key_width", "value_width", "block_size")),
        *((name, INT32) for name in ("sliding_window", "num_threads", "kernel")),
        *((name, FLOAT) for name in ("scale", "softcap")),
    )


class _WriteArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("key", "value", "keys", "values", "slot_mapping")),
        *((name, INT64) for name in ("key_token_stride", "key_head_stride")),
        *((name, INT64) for name in ("value_token_stride", "value_head_stride")),
        *((name, INT64) for name in ("keys_slot_stride", "keys_head_stride")),
        *((name, INT64) for name in ("values_slot_stride", "values_head_stride")),
        *((name, INT32) for name in ("num_tokens", "num_kv_heads", "key_width", "value_width")),
        ("block_size", INT32),
    )


def supports(dtype: torch.dtype) -> bool:
    """Return true if the C kernels can be compiled and support ``dtype``."""
    return dtype in _ATTEND and load() is not None


def reads(pool_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Return true if the C kernels can be compiled and support queries of ``dtype`` over a pool of
    ``pool_dtype``."""
    return pool_dtype in (dtype, torch.float8_e4m3fn) and supports(dtype)


def available(dtype: torch.dtype) -> tuple[str, ...]:
    """Like ``gemm.available``, for attention over a pool of ``dtype``."""
    return tuple(kernels_of(load(), "attend", dtype))


def kernel_of(dtype: torch.dtype, instructions: str | None = None) -> int:
    """Return the number of the attention kernel for ``instructions``, or of the fastest if None.
    All kernels read the same pool, but give different bits."""
    return chosen(kernels_of(load(), "attend", dtype), instructions)


def paged_attention(
    query: torch.Tensor,  # [T, Hq, Dk], last dimension contiguous
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dk], as kv_write wrote it
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dv], as kv_write wrote it
    block_tables: torch.Tensor,  # [S, max_blocks] int32, contiguous
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32
    *,
    scale: float,
    out: torch.Tensor,  # [T, Hq, Dv], last two dimensions contiguous
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [Hq]
    order: torch.Tensor | None = None,  # [S] int32
    shared_lens: torch.Tensor | None = None,  # [S] int32
    query_ends: torch.Tensor | None = None,  # [T] int32
    prompt_lens: torch.Tensor | None = None,  # [S] int32
    kernel: int | None = None,
) -> None:
    """Compute causal attention over a paged KV cache on the CPU, like
    ``reference.paged_attention``.

    Queries are float32 or bfloat16. The pool has the same dtype or float8 e4m3fn. Sums are float32.
    A row's bits depend only on its own context. A block stores float8 keys as ``[width][size]``.

    Args:
        order: the indices of all sequences; sequences that share a prefix are adjacent.
        shared_lens: number of leading tokens that each sequence of ``order`` shares with the
            previous sequence. Shared tokens are in the same blocks and come before the query tokens
            of both sequences. Shared tokens are read once for many rows, which does not change the
            result.
        query_ends, prompt_lens: see ``reference.paged_attention``.
        kernel: a kernel's number, from ``kernel_of``; None: the fastest kernel.
    """
    library = load()
    assert library is not None
    if sinks is not None:
        sinks = sinks.float().contiguous()
    arguments = attention_args(
        *(query, key_cache, value_cache, block_tables, query_starts, context_lens),
        scale=scale,
        out=out,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        order=order,
        shared_lens=shared_lens,
        query_ends=query_ends,
        prompt_lens=prompt_lens,
        kernel=kernel_of(key_cache.dtype) if kernel is None else kernel,
    )
    name = _ATTEND[query.dtype]
    if key_cache.dtype == torch.float8_e4m3fn:
        name += "_e4m3"
    if getattr(library, name)(ctypes.byref(arguments)):
        raise MemoryError("not enough memory for the workspace of paged attention")


def attention_args(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    sliding_window: int,
    softcap: float,
    sinks: torch.Tensor | None,  # float32, contiguous
    order: torch.Tensor | None,
    shared_lens: torch.Tensor | None,
    query_ends: torch.Tensor | None,
    prompt_lens: torch.Tensor | None,
    kernel: int,
) -> AttentionArgs:
    """Convert the arguments of ``paged_attention`` to the C function's arguments."""
    return AttentionArgs(
        *(t.data_ptr() for t in (query, out, key_cache, value_cache)),
        *(t.data_ptr() for t in (block_tables, query_starts, context_lens)),
        *(None if t is None else t.data_ptr() for t in (sinks, order, shared_lens)),
        *(None if t is None else t.data_ptr() for t in (query_ends, prompt_lens)),
        *query.stride()[:2],
        out.stride(0),
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        block_tables.shape[1],
        len(context_lens),
        query.shape[1],
        key_cache.shape[1],
        key_cache.shape[3],
        value_cache.shape[3],
        key_cache.shape[2],
        sliding_window,
        torch.get_num_threads(),
        kernel,
        scale,
        softcap,
    )


def kv_write(
    key: torch.Tensor,  # [T, Hkv, Dk], last dimension contiguous
    value: torch.Tensor,  # [T, Hkv, Dv], last dimension contiguous
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dk], last two contiguous
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dv], last two contiguous
    slot_mapping: torch.Tensor,  # [T] int64
) -> None:
    """Store keys and values in their slots. The reference is ``reference.kv_write``."""
    library = load()
    assert library is not None
    arguments = _WriteArgs(
        *(t.data_ptr() for t in (key, value, key_cache, value_cache, slot_mapping)),
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        *(len(key), key_cache.shape[1], key_cache.shape[3], value_cache.shape[3]),
        key_cache.shape[2],
    )
    getattr(library, f"write_kv_{SUFFIX[key_cache.dtype]}")(ctypes.byref(arguments))


def read_keys(
    cache: torch.Tensor,  # [..., block_size, Dk], as ``kv_write`` wrote it
) -> torch.Tensor:
    """Return a copy of the keys in the order of positions, [..., block_size, Dk]."""
    *blocks, size, width = cache.shape
    if width % 2 or not _in_pairs(cache.dtype):
        return cache.reshape(*blocks, width, size).transpose(-1, -2).contiguous()
    return cache.reshape(*blocks, width // 2, size, 2).transpose(-2, -3).reshape(cache.shape)


def read_values(
    cache: torch.Tensor,  # [..., block_size, Dv], as ``kv_write`` wrote it
) -> torch.Tensor:
    """Return a copy of the values in the order of positions, [..., block_size, Dv]."""
    *blocks, size, width = cache.shape
    if size % 2 or not _in_pairs(cache.dtype):
        return cache.clone()
    return cache.reshape(*blocks, size // 2, width, 2).transpose(-1, -2).reshape(cache.shape)


def _in_pairs(dtype: torch.dtype) -> bool:
    library = load()
    assert library is not None
    return dtype == torch.bfloat16 and bool(library.stores_pairs())
