# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
# (A kernel's arguments are Triton's own values and mypy cannot type them: what they hold stands in
# the comment behind each. Compile-time constants are written as constants.)
"""Attention of the sequences that compute several tokens in this step.

One program has a tile of a sequence's query tokens and walks over all the positions that they see,
without masks up to the diagonal.
"""

from typing import Any

import triton
import triton.language as tl

from batchinfer.kernels.attend import (
    LaunchConfig,
    attend,
    divide,
    initial_state,
    padded,
    tile_tokens,
)
from batchinfer.kernels.launch import OPTIONS


def chunk_config(group: int, widths: int, element_size: int) -> LaunchConfig:
    """Launch shape: 128 rows, or one token's heads where a group has more; 64 where heads are wide.

    A tile of keys and values then makes 128 products per element loaded: at 350 TFLOP/s the
    multiprocessors of an H200 read 2.7 TB/s from its L2, with 64 rows 5.4.
    """
    small = widths * element_size <= 512
    return LaunchConfig(
        rows=max(128 if small else 64, padded(group)),
        tile=tile_tokens(widths, element_size),
        num_warps=8,
        num_stages=5 if small else 2,
    )


def attend_chunks(
    shared: dict[str, Any], num_tokens: int, num_sequences: int, element_size: int
) -> None:
    """Attend in chunks; `shared` are the arguments of both kinds of programs."""
    widths = shared["KEY_BLOCK"] + shared["VALUE_BLOCK"]
    config = chunk_config(shared["GROUP"], widths, element_size)
    tokens = config.rows // shared["GROUP"]
    # The lengths are on the device, so this is the most tiles there can be (see `_find_sequence`).
    grid = (num_tokens // tokens + num_sequences, shared["NUM_KV_HEADS"])
    arguments = {name: value for name, value in shared.items() if name != "NUM_KV_HEADS"}
    _chunk_kernel[grid](
        **arguments,
        num_sequences=num_sequences,
        TOKENS=tokens,
        ROWS=config.rows,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **OPTIONS,
    )


@triton.jit
def _find_sequence(
    query_starts_ptr,  # [S + 1] int32
    index,  # of a tile of query tokens
    num_sequences,
    TOKENS: tl.constexpr,
):
    # Sequence s owns the indices from query_starts[s] // TOKENS + s on. That leaves it
    # floor(end / TOKENS) - floor(start / TOKENS) + 1 >= ceil((end - start) / TOKENS): enough
    # for its tiles, and no index depends on how the sequences before s are divided up.
    low = tl.full([], 0, tl.int32)
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_starts_ptr + middle) // TOKENS + middle <= index:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=["table_stride", "num_sequences"])
def _chunk_kernel(
    query_ptr,  # [T, Hq, Dk]
    key_ptr,  # [num_slots, Hkv, block_size, Dk]
    value_ptr,  # [num_slots, Hkv, block_size, Dv]
    table_ptr,  # [S, max_blocks] int32
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, Dv]
    sinks_ptr,  # [Hq] or None
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
    num_sequences,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,  # elements, of where a token lies
    ROW_TYPE: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens of a tile
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    index = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = _find_sequence(query_starts_ptr, index, num_sequences, TOKENS)
    query_start = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - query_start
    first = (index - query_start // TOKENS - sequence) * TOKENS
    if (query_len < 2) | (first >= query_len):
        return
    context_len = tl.load(context_lens_ptr + sequence)
    computed = context_len - query_len  # tokens of the sequence before this step

    rows = tl.arange(0, ROWS)
    query_tokens = first + rows // GROUP
    row_live = (rows < TOKENS * GROUP) & (query_tokens < query_len)
    query_rows = (query_start + query_tokens).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    columns = tl.arange(0, KEY_BLOCK)
    query = tl.load(
        query_ptr
        + (query_rows * query_row_stride + heads * query_head_stride)[:, None]
        + columns[None, :] * query_width_stride,
        mask=row_live[:, None] & (columns[None, :] < KEY_WIDTH),
        other=0.0,
    )
    row_max, row_sum = initial_state(sinks_ptr, heads, row_live, ROWS)
    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    key_ptr += kv_head * key_head_stride
    value_ptr += kv_head * value_head_stride
    table_ptr += sequence.to(tl.int64) * table_stride
    begin = tl.maximum(computed + first - window + 1, 0) if WINDOWED else 0
    if not WINDOWED:
        # Most tiles are seen by every row whole: no masks there.
        end = (computed + first + 1) // TILE * TILE
        row_max, row_sum, acc = attend(
            query, computed + query_tokens, begin, end, row_max, row_sum, acc,
            key_ptr, value_ptr, table_ptr,
            key_slot_units, key_token_units, key_width_stride,
            value_slot_units, value_token_units, value_width_stride,
            score_scale, cap, window,
            BLOCK_SIZE, KEY_WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
            UNIT, ROW_TYPE, SAME_ROWS, WINDOWED, CAPPED, TILE, False,
        )  # fmt: skip
        begin = end
    end = computed + tl.minimum(first + TOKENS, query_len)
    row_max, row_sum, acc = attend(
        query, computed + query_tokens, begin, end, row_max, row_sum, acc,
        key_ptr, value_ptr, table_ptr,
        key_slot_units, key_token_units, key_width_stride,
        value_slot_units, value_token_units, value_width_stride,
        score_scale, cap, window,
        BLOCK_SIZE, KEY_WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
        UNIT, ROW_TYPE, SAME_ROWS, WINDOWED, CAPPED, TILE, True,
    )  # fmt: skip

    columns = tl.arange(0, VALUE_BLOCK)
    out_ptrs = out_ptr + (query_rows * out_row_stride + heads * out_head_stride)[:, None]
    tl.store(
        out_ptrs + columns[None, :] * out_width_stride,
        divide(acc, row_sum[:, None]),
        mask=row_live[:, None] & (columns[None, :] < VALUE_WIDTH),
    )
