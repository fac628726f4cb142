"""The loop over a paged KV cache that decodes and chunks share, and the shape of their programs.

One program carries a tile of rows (query tokens times the query heads of one KV head, next to each
other, so that a key is loaded once for all of them) over a range of positions, by online softmax;
`README.md` has the formulas.

Triton divides the stages of its pipeline among the links of a chain of loads, and keys and values
are loaded by slots that are loaded from the block table: 5 stages fetch two tiles ahead, 3 one.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from batchinfer.kernels.fp8 import in_float16
from batchinfer.kernels.fp8_words import widen_cache
from batchinfer.kernels.launch import compute_capability

LOG2E = math.log2(math.e)
# Keys and values of one tile take at most this much shared memory, per pipeline stage.
_TILE_BYTES = 32 * 2**10


@dataclass(frozen=True)
class Heads:
    """What launch shapes follow from, beside the kind of program. Same input, same bits."""

    group: int  # query heads of a KV head
    widths: int  # elements of a key and a value, each padded
    query_bytes: int  # of an element
    cache_bytes: int
    capability: int  # compute capability: 90 is 9.0

    @classmethod
    def of(cls, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> Self:
        """Read them from `paged_attention`'s arguments."""
        return cls(
            query.shape[1] // key_cache.shape[1],
            padded(key_cache.shape[3]) + padded(value_cache.shape[3]),
            query.element_size(),
            key_cache.element_size(),
            compute_capability(query.device),
        )


@dataclass(frozen=True)
class LaunchConfig:
    """The shape of one program."""

    rows: int  # query tokens x heads of a group, padded: the M of the matrix products
    tile: int  # tokens of context per turn of the loop
    num_warps: int
    num_stages: int


def tile_tokens(heads: Heads, most: int) -> int:
    """Tokens per tile: a power of two, so that key and value of them fit `_TILE_BYTES`."""
    tokens = min(most, _TILE_BYTES // (heads.widths * heads.cache_bytes))
    return max(16, 1 << (tokens.bit_length() - 1))


def padded(size: int) -> int:
    """The power of two at or above `size` that `tl.dot` takes."""
    return max(16, 1 << (size - 1).bit_length())


@triton.jit
def load_tokens(
    cache_ptr,  # [num_slots, block_size, D] of one KV head
    rows,  # [TILE] int32 or int64: where the tokens lie, in units
    live,  # [TILE, 1] bool, or None: all are
    width_stride,
    UNIT: tl.constexpr,  # elements
    WIDTH: tl.constexpr,  # D
    WIDTH_BLOCK: tl.constexpr,  # D, padded
):  # [TILE, WIDTH_BLOCK]
    # The columns are added first: what changes from tile to tile is one multiply-add a token.
    columns = tl.arange(0, WIDTH_BLOCK)
    ptrs = (cache_ptr + columns * width_stride)[None, :] + rows[:, None].to(tl.int64) * UNIT
    mask = columns[None, :] < WIDTH
    if live is not None:
        mask = mask & live
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def load_turned(
    cache_ptr,  # [num_slots, D, block_size] of one KV head
    slots,  # [TILE] int32 or int64
    offsets,  # [TILE] int32: tokens in their blocks
    slot_units,
    width_stride,
    UNIT: tl.constexpr,  # elements
    WIDTH: tl.constexpr,  # D
    WIDTH_BLOCK: tl.constexpr,  # D, padded
    BLOCK_SIZE: tl.constexpr,
):  # [WIDTH_BLOCK, TILE]
    # Neighbours in a block are neighbours in memory, which Triton cannot see from a table.
    tile: tl.constexpr = slots.shape[0]
    if tile % BLOCK_SIZE == 0:
        slots = tl.max_constancy(slots, BLOCK_SIZE)
    columns = tl.arange(0, WIDTH_BLOCK)
    tokens = (slots * slot_units).to(tl.int64) * UNIT + offsets
    ptrs = (cache_ptr + columns * width_stride)[:, None] + tokens[None, :]
    if WIDTH == WIDTH_BLOCK:
        turned = tl.load(ptrs)
    else:
        turned = tl.load(ptrs, mask=columns[:, None] < WIDTH, other=0.0)
    return turned


@triton.jit
def load_query(
    ptrs,  # [ROWS, KEY_BLOCK]
    mask,  # [ROWS, KEY_BLOCK]
    score_scale,
    CACHE_TYPE: tl.constexpr,
):  # [ROWS, KEY_BLOCK] as it is multiplied, and [ROWS] float32, the scale of each row's scores
    query = tl.load(ptrs, mask=mask, other=0.0)
    scales = tl.zeros([query.shape[0]], tl.float32) + score_scale
    if (query.dtype == tl.bfloat16) & (CACHE_TYPE.primitive_bitwidth == 8):
        # float8 becomes float16 in one instruction for two, bfloat16 in four.
        query, down = in_float16(query.to(tl.float32))
        scales = scales * down
    return query, scales


@triton.jit
def attend(
    query,  # [ROWS, KEY_BLOCK]
    positions,  # [ROWS] int32, of each row's token
    begin,  # first and
    end,  # last + 1 position to read
    row_max,  # [ROWS] float32: the state so far
    row_sum,  # [ROWS] float32
    acc,  # [ROWS, VALUE_BLOCK] float32
    key_ptr,  # [num_slots, block_size, Dk] of the KV head
    value_ptr,  # [num_slots, block_size, Dv] of the KV head; turned: [num_slots, Dv, block_size]
    table_ptr,  # [max_blocks] int32, the sequence's
    key_slot_units,
    key_token_units,
    key_width_stride,
    value_slot_units,
    value_token_units,
    value_width_stride,
    scales,  # [ROWS] float32, of the scores
    cap,
    window,
    BLOCK_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    ROW_TYPE: tl.constexpr,  # int32 where every row of the pool has such a number
    SAME_ROWS: tl.constexpr,  # of keys and values
    TURNED: tl.constexpr,  # values lie in their blocks by columns, and none is NaN
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # false: whole tiles, and every row sees all of them
):
    places = tl.arange(0, TILE)
    # Tiles lie at multiples of TILE, wherever the range begins: a tile then meets whole blocks.
    for tile in range(begin // TILE * TILE, end, TILE):
        tokens = tile + places
        if TILE % BLOCK_SIZE == 0:
            blocks, offsets = tile // BLOCK_SIZE + places // BLOCK_SIZE, places % BLOCK_SIZE
        else:
            blocks, offsets = tokens // BLOCK_SIZE, tokens % BLOCK_SIZE
        live = None
        if MASKED:
            # Blocks are clamped instead of masked, and what is seen is told below by positions:
            # a mask of its own for each use is cheaper than one that the pipeline carries along.
            blocks = tl.minimum(blocks, (end - 1) // BLOCK_SIZE)
            live = tokens[:, None] < end
            if WINDOWED:
                blocks = tl.maximum(blocks, begin // BLOCK_SIZE)
                live = live & (tokens[:, None] >= begin)
        slots = tl.load(table_ptr + blocks).to(ROW_TYPE)
        rows = slots * key_slot_units + offsets * key_token_units

        # Dead keys are read, and their scores replaced. Dead values are 0 by selection: a weight of
        # 0 would not do, since a slot holds whatever its last user left, and 0 * NaN is NaN.
        key = load_tokens(key_ptr, rows, None, key_width_stride, UNIT, KEY_WIDTH, KEY_BLOCK)
        key = widen_cache(key, query.dtype, True)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if CAPPED:
            scores = cap - 2.0 * cap / (tl.exp2(scores * scales[:, None]) + 1.0)
        if MASKED:
            visible = tokens[None, :] <= positions[:, None]
            if WINDOWED:
                visible = visible & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))

        # Scales are positive: they are multiplied into the maximum, and fused into the exponent.
        tile_max = tl.max(scores, 1)
        if not CAPPED:
            tile_max *= scales
            scores *= scales[:, None]
        if TURNED and query.dtype == tl.float16:
            # Weights up to 2^15 instead of 1, and the sum with them: float16 ends at 2^-24.
            tile_max -= 15.0
        new_max = tl.maximum(row_max, tile_max)
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max

        weights = weights.to(query.dtype)
        if TURNED:
            value = load_turned(
                value_ptr, slots, offsets, value_slot_units, value_width_stride,
                UNIT, VALUE_WIDTH, VALUE_BLOCK, BLOCK_SIZE,
            )  # fmt: skip
            value = tl.trans(widen_cache(value, query.dtype, False))
        else:
            if not SAME_ROWS:
                rows = slots * value_slot_units + offsets * value_token_units
            value = load_tokens(
                value_ptr, rows, live, value_width_stride, UNIT, VALUE_WIDTH, VALUE_BLOCK
            )
            value = widen_cache(value, query.dtype, True)
        acc = tl.dot(weights, value, acc * decay[:, None], input_precision="ieee")
    return row_max, row_sum, acc


@triton.jit
def initial_state(
    sinks_ptr,  # [Hq] or None
    heads,  # [ROWS]
    holds_sinks,  # [ROWS] bool
    ROWS: tl.constexpr,
):
    # A sink is a logit that was seen before the first key and has no value.
    if sinks_ptr is None:
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
    else:
        sinks = tl.load(sinks_ptr + heads, mask=holds_sinks, other=float("-inf")).to(tl.float32)
        row_max = sinks * 1.4426950408889634  # log2(e)
        row_sum = tl.where(row_max > float("-inf"), 1.0, 0.0)
    return row_max, row_sum


@triton.jit
def divide(acc, row_sum):
    # Nothing seen (a padding row): zeros.
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)
