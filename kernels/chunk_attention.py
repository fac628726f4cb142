"""Attention of the sequences that compute several tokens in this step.

One program has a tile of a sequence's query tokens and walks over all the positions that they see,
without masks up to the diagonal.
"""

from typing import Any

import triton
import triton.language as tl

from batchinfer.kernels.attend import (
    Heads,
    LaunchConfig,
    attend,
    divide,
    initial_state,
    load_query,
    padded,
)
from batchinfer.kernels.chunk_work import ChunkWork
from batchinfer.kernels.launch import OPTIONS


def chunk_config(heads: Heads) -> LaunchConfig:
    """Launch shape: 128 rows, or one token's heads where a group has more.

    A tile of keys and values then makes 128 products per element loaded: at 350 TFLOP/s the
    multiprocessors of an H200 read 2.7 TB/s from its L2, with 64 rows 5.4. Warp groups (from
    compute capability 9.0) multiply from shared memory, which leaves registers for long tiles:
    what a row costs once a tile is then paid for more keys. float8 is widened in registers and
    takes some of them; float32 has no tensor cores.
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
    """Query tokens of a program, as `plan_chunks` takes them."""
    return chunk_config(heads).rows // heads.group


def attend_chunks(shared: dict[str, Any], heads: Heads, work: ChunkWork) -> None:
    """Attend in chunks; `shared` are the arguments of both kinds of programs."""
    config = chunk_config(heads)
    arguments = {name: value for name, value in shared.items() if name != "NUM_KV_HEADS"}
    _chunk_kernel[(len(work.items), shared["NUM_KV_HEADS"])](
        **arguments,
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
    key_ptr,  # [num_slots, Hkv, block_size, Dk]
    value_ptr,  # [num_slots, Hkv, block_size, Dv]
    table_ptr,  # [S, max_blocks] int32
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, Dv]
    sinks_ptr,  # [Hq] or None
    items_ptr,  # [N, 2] int32: sequence, first query token of the tile in it
    num_items_ptr,  # [1] int32
    query_row_stride,
    query_head_stride,
    query_width_stride,
    key_slot_units,
    key_token_units,
    key_head_stride,
    key_width_stride,
    value_slot_units,
    value_token_units,
    value_head_stride,
    value_width_stride,
    out_row_stride,
    out_head_stride,
    out_width_stride,
    table_stride,
    score_scale,
    cap,
    window,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,  # elements, of where a token lies
    ROW_TYPE: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    TURNED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens of a tile
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
    computed = context_len - query_len  # tokens of the sequence before this step

    rows = tl.arange(0, ROWS)
    query_tokens = first + rows // GROUP
    row_live = (rows < TOKENS * GROUP) & (query_tokens < query_len)
    query_rows = (query_start + query_tokens).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    columns = tl.arange(0, KEY_BLOCK)
    query, scales = load_query(
        query_ptr
        + (query_rows * query_row_stride + heads * query_head_stride)[:, None]
        + columns[None, :] * query_width_stride,
        row_live[:, None] & (columns[None, :] < KEY_WIDTH),
        score_scale,
        key_ptr.dtype.element_ty,
    )
    row_max, row_sum = initial_state(sinks_ptr, heads, row_live, ROWS)
    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    key_ptr += kv_head * key_head_stride
    value_ptr += kv_head * value_head_stride
    table_ptr += sequence * table_stride
    begin = tl.maximum(computed + first - window + 1, 0) if WINDOWED else 0
    if not WINDOWED:
        # Most tiles are seen by every row whole: no masks there.
        end = (computed + first + 1) // TILE * TILE
        row_max, row_sum, acc = attend(
            query, computed + query_tokens, begin, end, row_max, row_sum, acc,
            key_ptr, value_ptr, table_ptr,
            key_slot_units, key_token_units, key_width_stride,
            value_slot_units, value_token_units, value_width_stride,
            scales, cap, window,
            BLOCK_SIZE, KEY_WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
            UNIT, ROW_TYPE, SAME_ROWS, TURNED, WINDOWED, CAPPED, TILE, False,
        )  # fmt: skip
        begin = end
    end = computed + tl.minimum(first + TOKENS, query_len)
    row_max, row_sum, acc = attend(
        query, computed + query_tokens, begin, end, row_max, row_sum, acc,
        key_ptr, value_ptr, table_ptr,
        key_slot_units, key_token_units, key_width_stride,
        value_slot_units, value_token_units, value_width_stride,
        scales, cap, window,
        BLOCK_SIZE, KEY_WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
        UNIT, ROW_TYPE, SAME_ROWS, TURNED, WINDOWED, CAPPED, TILE, True,
    )  # fmt: skip

    columns = tl.arange(0, VALUE_BLOCK)
    out_ptrs = out_ptr + (query_rows * out_row_stride + heads * out_head_stride)[:, None]
    tl.store(
        out_ptrs + columns[None, :] * out_width_stride,
        divide(acc, row_sum[:, None]),
        mask=row_live[:, None] & (columns[None, :] < VALUE_WIDTH),
    )
