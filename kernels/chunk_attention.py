"""Attention for prefill chunks: sequences that compute several tokens in this step.

One program computes the attention of a tile of query tokens to all positions that they see. Tiles
of positions that all rows see need no masks. The list of query tiles is made on the device, once
for all layers (see `decode_plan.py`). Decodes have no tiles in this list, so the size of a launch
depends only on the step's chunks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from batchinfer.kernels.attention_loop import (
    Heads,
    LaunchConfig,
    attend,
    divide,
    initial_state,
    load_query,
    padded,
)
from batchinfer.kernels.decode_plan import append_items, sequences_at_once
from batchinfer.kernels.launch import OPTIONS


@dataclass(frozen=True)
class ChunkWork:
    items: torch.Tensor  # [N, 2] int32: sequence, and index of the tile's first query token in it
    num_items: torch.Tensor  # [1] int32
    tokens: int  # query tokens per tile, at most


def plan_chunks(
    query_starts: torch.Tensor,  # [S + 1] int32
    *,
    tokens: int,
    num_tokens: int,
    max_chunks: int | None = None,
) -> ChunkWork:
    """List the tiles of all chunks: sequences with several query tokens.

    Args:
        tokens: query tokens per tile, from `query_tile`.
        max_chunks: upper bound on the number of chunks (default: all sequences).
    """
    num_sequences = len(query_starts) - 1
    # All tiles of a sequence except the last are full.
    max_items = num_tokens // tokens + (num_sequences if max_chunks is None else max_chunks)
    work = ChunkWork(
        items=torch.empty(max_items, 2, dtype=torch.int32, device=query_starts.device),
        num_items=torch.empty(1, dtype=torch.int32, device=query_starts.device),
        tokens=tokens,
    )
    _plan_chunks_kernel[(1,)](
        query_starts,
        work.items,
        work.num_items,
        num_sequences,
        max_items,
        TOKENS=tokens,
        SEQUENCES=sequences_at_once(num_sequences),
        **OPTIONS,
    )
    return work


@triton.jit(do_not_specialize=["num_sequences", "max_items"])
def _plan_chunks_kernel(
    query_starts_ptr,  # [S + 1] int32
    items_ptr,  # [max_items, 2] int32
    num_items_ptr,  # [1] int32
    num_sequences,
    max_items,
    TOKENS: tl.constexpr,
    SEQUENCES: tl.constexpr,  # sequences per iteration
):
    num_items = tl.full([], 0, tl.int32)
    for start in range(0, num_sequences, SEQUENCES):
        sequences = start + tl.arange(0, SEQUENCES)
        in_range = sequences < num_sequences
        begin = tl.load(query_starts_ptr + sequences, mask=in_range, other=0)
        query_len = tl.load(query_starts_ptr + sequences + 1, mask=in_range, other=0) - begin
        tiles = tl.where(query_len > 1, tl.cdiv(query_len, TOKENS), 0)
        num_items = append_items(
            items_ptr, num_items, max_items, sequences, tiles * 0, tiles, TOKENS
        )
    tl.store(num_items_ptr, tl.minimum(num_items, max_items))


def chunk_config(heads: Heads) -> LaunchConfig:
    """Return the launch shape: at most 128 rows, unless the heads of one token need more.

    With 128 rows, each loaded element of keys and values is multiplied 128 times. At 350 TFLOP/s,
    an H200 then reads 2.7 TB/s from its L2 cache; with 64 rows, it would read 5.4 TB/s. Warp groups
    (compute capability 9.0 and later) multiply from shared memory, which leaves registers for long
    tiles. Long tiles spread the cost per row and tile over more keys. Tiles are shorter for float8,
    because the conversion takes registers, and for float32, which tensor cores do not multiply.
    """
    if heads.query_bytes == 4:
        return LaunchConfig(padded(heads.group), tile=16, num_warps=8, num_stages=2)
    warp_groups, fp8 = heads.capability >= 90, heads.cache_bytes == 1
    if heads.widths <= 128:
        rows, tile, num_stages = 128, 64, 5
    elif heads.widths <= 256:
        rows, tile, num_stages = (128, 128, 3) if warp_groups else (128, 32, 5)
        if fp8 and not warp_groups:
            return LaunchConfig(max(64, padded(heads.group)), tile, num_warps=4, num_stages=5)
    elif heads.widths > 512:
        rows, tile, num_stages = 64, 16, 2
    elif warp_groups:
        rows, tile, num_stages = (128, 16, 3) if fp8 else (128, 64, 3)
    else:
        rows, tile, num_stages = 64, 32, 2
    return LaunchConfig(max(rows, padded(heads.group)), tile, num_warps=8, num_stages=num_stages)


def query_tile(heads: Heads) -> int:
    return chunk_config(heads).rows // heads.group


def attend_chunks(
    shared: dict[str, Any], heads: Heads, work: ChunkWork, query_ends: torch.Tensor | None = None
) -> None:
    config = chunk_config(heads)
    arguments = {name: value for name, value in shared.items() if name != "NUM_KV_HEADS"}
    _chunk_kernel[(len(work.items), shared["NUM_KV_HEADS"])](
        **arguments,
        query_ends_ptr=query_ends,
        items_ptr=work.items,
        num_items_ptr=work.num_items,
        TOKENS=work.tokens,
        ROWS=config.rows,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **OPTIONS,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _chunk_kernel(
    query_ptr,  # [T, Hq, Dk]
    query_strides,
    cache,  # Cache
    table_ptr,  # [S, max_blocks] int32
    table_stride,
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, Dv]
    out_strides,
    sinks_ptr,  # [Hq] or None
    prompt_lens_ptr,  # [S] int32 or None
    query_ends_ptr,  # [T] int32 or None
    items_ptr,  # [N, 2] int32: sequence, and index of the tile's first query token in it
    num_items_ptr,  # [1] int32
    score_scale,
    cap,  # or None
    window,  # or None
    GROUP: tl.constexpr,  # query heads per KV head
    TOKENS: tl.constexpr,  # query tokens per tile
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    index = tl.program_id(0)
    if index >= tl.load(num_items_ptr):
        return
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.load(items_ptr + 2 * index).to(tl.int64)
    first = tl.load(items_ptr + 2 * index + 1)
    query_start = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - query_start
    context_len = tl.load(context_lens_ptr + sequence)
    computed = context_len - query_len  # tokens that earlier steps computed

    rows = tl.arange(0, ROWS)
    query_tokens = first + rows // GROUP
    positions = computed + query_tokens
    row_live = (rows < TOKENS * GROUP) & (query_tokens < query_len)
    query_rows = (query_start + query_tokens).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    columns = tl.arange(0, cache.KEY_BLOCK)
    query, scales = load_query(
        query_ptr
        + (query_rows * query_strides[0] + heads * query_strides[1])[:, None]
        + columns[None, :] * query_strides[2],
        row_live[:, None] & (columns[None, :] < cache.KEY_WIDTH),
        score_scale,
        cache.key_ptr.dtype.element_ty,
    )
    row_max, row_sum = initial_state(sinks_ptr, heads, row_live, ROWS)
    acc = tl.zeros([ROWS, cache.VALUE_BLOCK], tl.float32)
    table_ptr += sequence * table_stride
    if window is None:
        # Every row sees these tiles completely, so they need no masks.
        begin = (computed + first + 1) // TILE * TILE
        row_max, row_sum, acc = attend(
            query, positions, 0, begin, row_max, row_sum, acc,
            cache, kv_head, table_ptr, scales, cap, window, TILE, False,
        )  # fmt: skip
    elif prompt_lens_ptr is None:
        begin = tl.maximum(computed + first - window + 1, 0)
    else:
        begin = computed * 0
    end = computed + tl.minimum(first + TOKENS, query_len)
    ends = None
    if query_ends_ptr is not None:
        ends = tl.load(query_ends_ptr + query_rows, mask=row_live, other=0)
        end = tl.max(ends, 0)
    prompt_len = None
    if prompt_lens_ptr is not None:
        prompt_len = tl.load(prompt_lens_ptr + sequence)
    row_max, row_sum, acc = attend(
        query, positions, begin, end, row_max, row_sum, acc,
        cache, kv_head, table_ptr, scales, cap, window, TILE, True, ends, prompt_len,
    )  # fmt: skip

    columns = tl.arange(0, cache.VALUE_BLOCK)
    out_ptrs = out_ptr + (query_rows * out_strides[0] + heads * out_strides[1])[:, None]
    tl.store(
        out_ptrs + columns[None, :] * out_strides[2],
        divide(acc, row_sum[:, None]),
        mask=row_live[:, None] & (columns[None, :] < cache.VALUE_WIDTH),
    )
