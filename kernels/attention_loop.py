"""Code that all attention kernels share: the loop over a paged KV cache, and launch shapes.

One program computes a tile of rows over a range of positions with an online softmax (formulas:
`README.md`). A tile has a row for each of its query tokens and each query head of one KV head, so
each key is loaded once for all rows. The rows of a token's heads are adjacent.

The addresses of keys and values depend on slots, which are loaded from the block table first.
Triton divides its pipeline stages among such dependent loads: with 5 stages it fetches two tiles
ahead, and with 3 stages one tile.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl

from batchinfer.kernels.fp8 import as_readable, in_float16, is_transposed
from batchinfer.kernels.fp8_to_16_bits import widen_cache
from batchinfer.kernels.launch import compute_capability

LOG2E = math.log2(math.e)
# Bytes of shared memory for the keys and values of one tile, per pipeline stage.
_TILE_BYTES = 32 * 2**10
_INT32_ROWS = 2**31


@dataclass(frozen=True)
class Heads:
    """The properties of a model and device that determine a program's launch shape. No other
    property may affect the launch shape, so that the same input always gives the same bits.
    """

    group: int  # query heads per KV head
    widths: int  # padded width of a key plus padded width of a value
    query_bytes: int  # bytes per element
    cache_bytes: int  # bytes per element
    capability: int  # compute capability; 90 means 9.0

    @classmethod
    def of(cls, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> Self:
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

    rows: int  # query tokens x heads of a group, padded: the M dimension of the program's GEMMs
    tile: int  # context tokens per iteration of the loop
    num_warps: int
    num_stages: int


def tile_tokens(heads: Heads, most: int) -> int:
    """Return the number of tokens per tile: a power of two for which the keys and values fit in
    `_TILE_BYTES`."""
    tokens = min(most, _TILE_BYTES // (heads.widths * heads.cache_bytes))
    return max(16, 1 << (tokens.bit_length() - 1))


def padded(size: int) -> int:
    """Round `size` up to a power of two that `tl.dot` accepts."""
    return max(16, 1 << (size - 1).bit_length())


class Cache(NamedTuple):
    """One layer's paged KV cache, passed to kernels as one argument.

    A token's row number is its offset in the cache, divided by UNIT elements. The offsets of all
    slots and tokens are multiples of UNIT, except for the tokens of transposed values.
    """

    key_ptr: torch.Tensor  # [num_slots, Hkv, block_size, Dk]
    value_ptr: torch.Tensor  # [num_slots, Hkv, block_size, Dv]
    key_slot_units: int
    key_token_units: int
    key_head_stride: int
    key_width_stride: int
    value_slot_units: int
    value_token_units: int
    value_head_stride: int
    value_width_stride: int
    BLOCK_SIZE: Any
    KEY_WIDTH: Any
    VALUE_WIDTH: Any
    KEY_BLOCK: Any  # padded width
    VALUE_BLOCK: Any  # padded width
    UNIT: Any
    ROW_TYPE: Any  # int32 if it can number every row of the pool, else int64
    SAME_ROWS: Any  # a token's key and value have the same row number
    TRANSPOSED: Any  # blocks store values as [Dv, block_size], and no value is NaN

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Self:
        key_slot, key_head, key_token, key_stride = keys.stride()
        value_slot, value_head, value_token, value_stride = values.stride()
        transposed = is_transposed(values)
        unit = math.gcd(key_slot, key_token, value_slot, 0 if transposed else value_token)
        num_rows = len(keys) * max(key_slot, value_slot) // unit
        constants = (
            keys.shape[2],
            keys.shape[3],
            values.shape[3],
            padded(keys.shape[3]),
            padded(values.shape[3]),
            unit,
            tl.int32 if num_rows <= _INT32_ROWS else tl.int64,
            (key_slot, key_token) == (value_slot, value_token),
            transposed,
        )
        return cls(
            *(as_readable(keys), as_readable(values)),
            *(key_slot // unit, key_token // unit, key_head, key_stride),
            *(value_slot // unit, value_token // unit, value_head, value_stride),
            *map(tl.constexpr, constants),
        )


@triton.jit
def load_tokens(
    ptr,  # the KV head's first element
    rows,  # [TILE] int32 or int64
    live,  # [TILE, 1] bool: true for tokens to load; None: all tokens
    width_stride,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):  # [TILE, WIDTH_BLOCK]
    # Add the columns first, so that computing a tile's addresses takes only one multiply-add per
    # token.
    columns = tl.arange(0, WIDTH_BLOCK)
    ptrs = (ptr + columns * width_stride)[None, :] + rows[:, None].to(tl.int64) * UNIT
    mask = columns[None, :] < WIDTH
    if live is not None:
        mask = mask & live
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _load_transposed(
    cache,  # Cache
    value_ptr,  # the KV head's first element
    slots,  # [TILE] int32 or int64
    offsets,  # [TILE] int32: position of each token in its block
):  # [VALUE_BLOCK, TILE]
    # Tell Triton that adjacent tokens of a block are adjacent in memory. Triton cannot infer this,
    # because slots are loaded from a table.
    tile: tl.constexpr = slots.shape[0]
    if tile // cache.BLOCK_SIZE * cache.BLOCK_SIZE == tile:
        slots = tl.max_constancy(slots, cache.BLOCK_SIZE)
    columns = tl.arange(0, cache.VALUE_BLOCK)
    tokens = (slots * cache.value_slot_units).to(tl.int64) * cache.UNIT + offsets
    ptrs = (value_ptr + columns * cache.value_width_stride)[:, None] + tokens[None, :]
    if cache.VALUE_WIDTH == cache.VALUE_BLOCK:
        transposed = tl.load(ptrs)
    else:
        transposed = tl.load(ptrs, mask=columns[:, None] < cache.VALUE_WIDTH, other=0.0)
    return transposed


@triton.jit
def load_query(
    ptrs,  # [ROWS, KEY_BLOCK]
    mask,  # [ROWS, KEY_BLOCK]
    score_scale,
    CACHE_TYPE: tl.constexpr,
):  # query [ROWS, KEY_BLOCK] in the dtype of the dot product, and [ROWS] float32 score scales
    query = tl.load(ptrs, mask=mask, other=0.0)
    scales = tl.zeros([query.shape[0]], tl.float32) + score_scale
    if (query.dtype == tl.bfloat16) & (CACHE_TYPE.primitive_bitwidth == 8):
        # Converting two float8 numbers to float16 takes one instruction; converting two to bfloat16
        # takes four.
        query, down = in_float16(query.to(tl.float32))
        scales = scales * down
    return query, scales


@triton.jit
def attend(
    query,  # [ROWS, KEY_BLOCK]
    positions,  # [ROWS] int32: position of each row's token
    begin,  # first position to read
    end,  # one past the last position to read
    row_max,  # [ROWS] float32: online softmax state so far
    row_sum,  # [ROWS] float32
    acc,  # [ROWS, VALUE_BLOCK] float32
    cache,  # Cache
    kv_head,
    table_ptr,  # [max_blocks] int32: the sequence's block table
    scales,  # [ROWS] float32: score scales
    cap,  # float32, or None
    window,  # or None
    TILE: tl.constexpr,
    # False: the range consists of whole tiles, and every row sees all positions in it.
    MASKED: tl.constexpr,
    ends=None,  # [ROWS] int32: one past the last position that each row sees; None: causal
    prompt_len=None,  # leading positions that the window does not hide; None: 0
):  # the new row_max, row_sum and acc
    key_ptr = cache.key_ptr + kv_head * cache.key_head_stride
    value_ptr = cache.value_ptr + kv_head * cache.value_head_stride
    places = tl.arange(0, TILE)
    # Tiles begin at multiples of TILE even if the range does not, so that tiles consist of whole
    # blocks.
    for tile in range(begin // TILE * TILE, end, TILE):
        tokens = tile + places
        if TILE // cache.BLOCK_SIZE * cache.BLOCK_SIZE == TILE:  # (tl.constexpr has no __rmod__)
            blocks = tile // cache.BLOCK_SIZE + places // cache.BLOCK_SIZE
            offsets = places % cache.BLOCK_SIZE
        else:
            blocks, offsets = tokens // cache.BLOCK_SIZE, tokens % cache.BLOCK_SIZE
        live = None
        if MASKED:
            # Clamp block numbers here, and mask scores below. Computing a mask at each use is
            # cheaper than carrying a mask through the pipeline.
            blocks = tl.minimum(blocks, (end - 1) // cache.BLOCK_SIZE)
            live = tokens[:, None] < end
            if window is not None:
                blocks = tl.maximum(blocks, begin // cache.BLOCK_SIZE)
                live = live & (tokens[:, None] >= begin)
        slots = tl.load(table_ptr + blocks).to(cache.ROW_TYPE)
        rows = slots * cache.key_slot_units + offsets * cache.key_token_units

        # Keys outside the range are loaded, but their scores are replaced. Values outside the range
        # are loaded as 0. A weight of 0 is not enough, because a reused slot may hold NaN, and
        # 0 * NaN is NaN.
        key = load_tokens(
            key_ptr, rows, None, cache.key_width_stride,
            cache.UNIT, cache.KEY_WIDTH, cache.KEY_BLOCK,
        )  # fmt: skip
        key = widen_cache(key, query.dtype, True)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if cap is not None:
            scores = cap - 2.0 * cap / (tl.exp2(scores * scales[:, None]) + 1.0)
        if MASKED:
            if ends is None:
                visible = tokens[None, :] <= positions[:, None]
            else:
                visible = tokens[None, :] < ends[:, None]
            if window is not None:
                in_window = tokens[None, :] > positions[:, None] - window
                if prompt_len is not None:
                    in_window = in_window | (tokens[None, :] < prompt_len)
                visible = visible & in_window
            scores = tl.where(visible, scores, float("-inf"))

        # Scales are positive, so scaling the maximum gives the maximum of the scaled scores.
        tile_max = tl.max(scores, 1)
        if cap is None:
            tile_max *= scales
            scores *= scales[:, None]
        if cache.TRANSPOSED and query.dtype == tl.float16:
            # Multiply weights (and the sum of weights) by 2^15, because weights below 2^-24 would
            # be 0 in float16.
            tile_max -= 15.0
        new_max = tl.maximum(row_max, tile_max)
        # Avoid computing -inf - -inf, which is NaN, for rows that have seen no token yet.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max

        weights = weights.to(query.dtype)
        if cache.TRANSPOSED:
            value = _load_transposed(cache, value_ptr, slots, offsets)
            value = tl.trans(widen_cache(value, query.dtype, False))
        else:
            if not cache.SAME_ROWS:
                rows = slots * cache.value_slot_units + offsets * cache.value_token_units
            value = load_tokens(
                value_ptr, rows, live, cache.value_width_stride,
                cache.UNIT, cache.VALUE_WIDTH, cache.VALUE_BLOCK,
            )  # fmt: skip
            value = widen_cache(value, query.dtype, True)
        acc = tl.dot(weights, value, acc * decay[:, None], input_precision="ieee")
    return row_max, row_sum, acc


@triton.jit
def initial_state(
    sinks_ptr,  # [Hq] or None
    heads,  # [ROWS]
    holds_sinks,  # [ROWS] bool
    ROWS: tl.constexpr,
):  # row_max and row_sum
    # A sink acts like the score of an additional first token without a value.
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
    # Padding rows see no token, so their sum and their output are 0.
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)
