"""Computes causal attention over a paged KV cache, for any mix of prefill chunks and decodes.

Formula, for the query token at position p of a sequence, head h, and all positions j that it sees
(j <= p and, with a window, p - j < sliding_window):

    s_j = scale * <q, k_j>                   softcap c > 0: s_j = c * tanh(s_j / c)
    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sinks[h]))      (last term: only with sinks)

Layout: `README.md` has shapes and strides. Query head h reads KV head h // (Hq / Hkv). The query
heads of a KV head are adjacent rows of one GEMM.

`decode_attention.py` computes sequences with one query token; `chunk_attention.py` computes
sequences with more query tokens. Both modules use the loop over the cache in `attention_loop.py`.
Every program reads the lengths on the device, so a captured launch can be replayed with other
lengths if the shapes of its tensors stay the same.

Accumulation: scores, running maximum, sum and output are float32. Softmax weights are rounded to
the query's dtype for the GEMM with V. With a float8 cache, softmax weights are rounded to float16,
or stay float32 if queries are float32 (`README.md`). float32 inputs are multiplied in full float32
(no TF32). Exponentials have base 2, with log2(e) multiplied into the scale.

Sources: online softmax as in FlashAttention-2 (Dao 2023, arXiv:2307.08691); pieces of a context as
in Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); the block table of PagedAttention (Kwon et al.
2023, arXiv:2309.06180); attention sinks as in gpt-oss (OpenAI 2025, arXiv:2508.10925).
"""

from typing import Any

import torch

from batchinfer.kernels.attention_loop import LOG2E, Cache, Heads
from batchinfer.kernels.chunk_attention import ChunkWork, attend_chunks
from batchinfer.kernels.decode_attention import attend_decodes
from batchinfer.kernels.decode_plan import DecodeWork
from batchinfer.kernels.fp8 import FP8, is_transposed
from batchinfer.kernels.launch import check_launchable


def paged_attention(
    query: torch.Tensor,  # [T, Hq, Dk], packed over sequences
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dk], any strides; or float8
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dv], any strides
    block_tables: torch.Tensor,  # [S, max_blocks] int32, width contiguous
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32, tokens in the cache after this step
    *,
    scale: float,
    out: torch.Tensor,  # [T, Hq, Dv], written in place
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [Hq]
    query_ends: torch.Tensor | None = None,  # [T] int32
    prompt_lens: torch.Tensor | None = None,  # [S] int32
    work: DecodeWork | None,
    launch: int = 0,
    chunks: ChunkWork | None,
) -> None:
    """Compute attention into `out`. The cache must already hold this step's keys and values.

    Rows of `query` and `out` from query_starts[S] onward are neither read nor written. A sequence
    may have no query tokens. The output of a sequence with one query token and a context of 0
    tokens is 0.

    Args:
        query_ends: see `reference.paged_attention`. A sequence with one query token must see its
            whole context.
        prompt_lens: see `reference.paged_attention`.
        work: from `plan_decode` for the same lengths and window, or without a window if
            `prompt_lens` are given; None if the step has no decodes.
        launch: index of this launch among those that use `work`.
        chunks: from `plan_chunks` for the same lengths; None if the step has no chunks.
    """
    check_launchable(
        "paged_attention", query, key_cache, value_cache, block_tables, query_starts, context_lens,
        out, sinks, query_ends, prompt_lens,
    )  # fmt: skip
    if len(context_lens) == 0 or len(query) == 0:
        return
    shared = shared_arguments(
        query, key_cache, value_cache, block_tables, query_starts, context_lens, out, sinks,
        scale, sliding_window, softcap, prompt_lens,
    )  # fmt: skip
    heads = Heads.of(query, key_cache, value_cache)
    if work is not None:
        check_window(work.window, sliding_window, prompt_lens)
        attend_decodes(shared, heads, work, launch, transposed=is_transposed(value_cache))
    if chunks is not None:
        attend_chunks(shared, heads, chunks, query_ends)


def check_window(planned: int, sliding_window: int, prompt_lens: torch.Tensor | None) -> None:
    """Check that a work list was made for this window. With `prompt_lens`, the list must cover
    whole contexts, because masks hide the positions outside the window."""
    wanted = sliding_window if prompt_lens is None else 0
    assert planned == wanted, "the work list was made for another window"


def shared_arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    sliding_window: int,
    softcap: float,
    prompt_lens: torch.Tensor | None,
) -> dict[str, Any]:
    """Check the tensors, and return the arguments that all attention kernels share, keyed by
    name."""
    num_kv_heads = key_cache.shape[1]
    assert scale > 0, "the scale must be positive"
    assert query.shape[2] == key_cache.shape[3], "query and key differ in width"
    assert key_cache.shape[:3] == value_cache.shape[:3], "key and value caches differ in shape"
    assert query.shape[1] % num_kv_heads == 0, (
        "the number of query heads must be a multiple of the number of KV heads"
    )
    assert out.shape == (*query.shape[:2], value_cache.shape[3]), "out has the wrong shape"
    assert key_cache.dtype == value_cache.dtype, "key and value caches differ in dtype"
    assert key_cache.dtype in (query.dtype, FP8), "query and cache differ in dtype"
    assert block_tables.stride(1) == 1, "a row of the block table must be contiguous"
    return {
        "query_ptr": query,
        "query_strides": query.stride(),
        "cache": Cache.of(key_cache, value_cache),
        "table_ptr": block_tables,
        "table_stride": block_tables.stride(0),
        "query_starts_ptr": query_starts,
        "context_lens_ptr": context_lens,
        "out_ptr": out,
        "out_strides": out.stride(),
        "sinks_ptr": sinks,
        "prompt_lens_ptr": prompt_lens,
        # tanh(x) = 1 - 2 / (exp(2x) + 1), so kernels compute exp2(score_scale * <q, k>) with or
        # without a softcap.
        "score_scale": scale * LOG2E * (2.0 / softcap if softcap else 1.0),
        "cap": softcap * LOG2E if softcap else None,
        "window": sliding_window or None,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": query.shape[1] // num_kv_heads,
    }
