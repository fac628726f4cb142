"""Decode attention that multiplies bfloat16 queries by a float8 cache without converting the cache.

A bfloat16 has 8 bits of significand and a float8 e4m3 has 4, so each query element is split into
the sum of two float8 terms, upper and lower. A softmax weight is also split into two terms. Both
GEMMs are transposed: keys times queries, and values times weights. The cache is the first operand
of both GEMMs. A warp group reads 64 rows of this operand from shared memory: tokens in the first
GEMM, and columns of values in the second. The terms of up to 8 heads fill the 16 columns of the
second operand.

Tensor cores of an H100 keep about 14 bits of a float8 sum, so each tile is summed separately, and
tiles are added in float32. Two float8 terms represent weights down to 2^-18 of the largest weight,
so weights are relative to the largest weight of their own tile. The maximum score `m` of
`README.md` is therefore the maximum of the latest tile, but not less than the largest maximum so
far minus 64 (in powers of two).

Blocks store values transposed, because float8 GEMMs sum over tokens and need the token dimension to
be contiguous in both operands. Values are never NaN (`without_nan`), so a weight of 0 is enough to
mask unused values.
"""

import triton
import triton.language as tl

from batchinfer.kernels.fp8 import narrow, widen

MAX_HEADS = 8
"""Largest number of query heads per KV head. Each query has two terms, so 8 heads fill 16
columns."""


@triton.jit
def split_float8(
    x,  # [ROWS, WIDTH] float32, converted from bfloat16
    CACHE_TYPE: tl.constexpr,  # float8, or uint8 for float8 as bytes
):  # codes of the upper and of the lower terms [ROWS, WIDTH], and their scales [ROWS] float32
    # Multiply each row by a power of two that makes the row's largest number at least 128, so that
    # only bits below 2^-10 are lost.
    largest = tl.max(tl.abs(x), 1)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 8), 253)
    up = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    down = tl.where(largest < float("inf"), down, float("nan"))
    upper, lower = _split(x * up[:, None], CACHE_TYPE)
    return upper, lower, down


@triton.jit
def load_split(
    ptrs,  # [HEADS, KEY_BLOCK]
    mask,  # [HEADS, KEY_BLOCK]
    score_scale,
    CACHE_TYPE: tl.constexpr,
):  # operand [KEY_BLOCK, 16], and the scale of each head's scores [HEADS] float32
    query = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    upper, lower, down = split_float8(query, CACHE_TYPE)
    return _as_columns(tl.trans(upper), tl.trans(lower), CACHE_TYPE), down * score_scale


@triton.jit
def attend_split(
    query,  # [KEY_BLOCK, 16], from `load_split`
    begin,  # first position to read
    end,  # one past the last position to read, the query token's position
    row_max,  # [HEADS] float32: initial state
    row_sum,  # [HEADS] float32
    cache,  # Cache
    kv_head,
    table_ptr,  # [max_blocks] int32: the sequence's block table
    scales,  # [HEADS] float32: score scales
    cap,  # or None
    WINDOWED: tl.constexpr,
    TILE: tl.constexpr,
):  # row_max, row_sum and output [VALUE_BLOCK, HEADS]
    heads: tl.constexpr = scales.shape[0]
    cache_type: tl.constexpr = cache.key_ptr.dtype.element_ty
    key_ptr = cache.key_ptr + kv_head * cache.key_head_stride
    value_ptr = cache.value_ptr + kv_head * cache.value_head_stride
    places = _by_rows(tl.arange(0, TILE))
    largest = row_max
    # Each thread sums the softmax weights of its own tokens. The sums of all threads are added at
    # the end.
    sums = tl.where(places[:, None] == 0, row_sum[None, :], 0.0)
    acc = tl.zeros([cache.VALUE_BLOCK, heads], tl.float32)
    for tile in range(begin // TILE * TILE, end, TILE):
        slots, offsets = _runs(table_ptr, tile, begin, end, cache.BLOCK_SIZE, WINDOWED, TILE)
        slots = slots.to(cache.ROW_TYPE)
        rows = slots * cache.key_slot_units + offsets * cache.key_token_units
        key = _load_keys(cache, key_ptr, rows, TILE)
        scores = _of_columns(tl.dot(_operand(key), query), heads)
        if cap is not None:
            scores = cap - 2.0 * cap / (tl.exp2(scores * scales[None, :]) + 1.0)
        tokens = tile + places
        visible = tokens < end
        if WINDOWED:
            visible = visible & (tokens >= begin)
        scores = tl.where(visible[:, None], scores, float("-inf"))

        # Scales are positive, so scaling the maximum gives the maximum of the scaled scores.
        # Subtracting 8 multiplies weights by 2^8.
        tile_max = tl.max(scores, 0)
        if cap is None:
            tile_max *= scales
            scores *= scales[None, :]
        tile_max -= 8.0
        largest = tl.maximum(largest, tile_max)
        new_max = tl.maximum(tile_max, largest - 64.0)
        # Avoid computing -inf - -inf, which is NaN, for heads that have seen no token yet.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[None, :])
        decay = tl.exp2(row_max - shift)
        row_max = new_max
        sums = sums * decay[None, :] + weights

        upper, lower = _split(weights, cache_type)
        weights = _as_columns(_by_tokens(upper), _by_tokens(lower), cache_type)
        firsts = (slots * cache.value_slot_units).to(tl.int64) * cache.UNIT + offsets
        value = _load_values(cache, value_ptr, firsts, TILE)
        added = _of_columns(tl.dot(_operand(value), weights), heads)
        acc = tl.fma(acc, tl.broadcast_to(decay[None, :], acc.shape), added)
    return row_max, tl.sum(sums, 0), acc


# A tile is cut into runs of adjacent tokens of one block. A thread copies parts of only a few runs,
# so it computes only a few addresses and derives the rest by adding constants.
@triton.jit
def _runs(
    table_ptr,
    tile,
    begin,
    end,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    TILE: tl.constexpr,
):  # [runs] int32 each: slots, and the offsets of the runs' first tokens in them
    divides: tl.constexpr = BLOCK_SIZE & -BLOCK_SIZE  # largest power of two that divides BLOCK_SIZE
    run: tl.constexpr = divides if divides < TILE else TILE
    firsts = tl.arange(0, TILE // run) * run
    if TILE // BLOCK_SIZE * BLOCK_SIZE == TILE:
        blocks, offsets = tile // BLOCK_SIZE + firsts // BLOCK_SIZE, firsts % BLOCK_SIZE
    else:
        blocks, offsets = (tile + firsts) // BLOCK_SIZE, (tile + firsts) % BLOCK_SIZE
    # Clamp block numbers to the first and last block of the range.
    blocks = tl.minimum(blocks, (end - 1) // BLOCK_SIZE)
    if WINDOWED:
        blocks = tl.maximum(blocks, begin // BLOCK_SIZE)
    return tl.load(table_ptr + blocks), offsets


@triton.jit
def _load_keys(
    cache,  # Cache
    key_ptr,  # the KV head's first element
    rows,  # [runs] int32 or int64: first row of each run
    TILE: tl.constexpr,
):  # [TILE, KEY_BLOCK], in the order of `_by_rows`
    unit: tl.constexpr = cache.UNIT
    places = tl.arange(0, TILE // rows.shape[0]) * cache.key_token_units * unit
    tokens = rows.to(tl.int64)[:, None] * unit + places[None, :]
    tokens = _by_rows(tl.reshape(tokens, [TILE]))[:, None]
    # Tell Triton a divisor of the offsets again, because version 3.6 loses it in a reshape.
    tokens = tl.multiple_of(tokens, [unit & -unit, unit & -unit])
    columns = tl.arange(0, cache.KEY_BLOCK)
    ptrs = (key_ptr + columns * cache.key_width_stride)[None, :] + tokens
    return tl.load(ptrs, mask=columns[None, :] < cache.KEY_WIDTH, other=0.0)


@triton.jit
def _load_values(
    cache,  # Cache
    value_ptr,  # [num_slots, Dv, block_size]: the KV head's first element
    firsts,  # [runs] int64: offset of each run's first token
    TILE: tl.constexpr,
):  # [VALUE_BLOCK, TILE]
    run: tl.constexpr = TILE // firsts.shape[0]
    tokens = tl.reshape(firsts[:, None] + tl.arange(0, run)[None, :], [TILE])
    tokens = tl.max_contiguous(tl.multiple_of(tokens, run), run)
    columns = tl.arange(0, cache.VALUE_BLOCK)
    ptrs = (value_ptr + columns * cache.BLOCK_SIZE)[:, None] + tokens[None, :]
    if cache.VALUE_WIDTH == cache.VALUE_BLOCK:
        values = tl.load(ptrs)
    else:
        values = tl.load(ptrs, mask=columns[:, None] < cache.VALUE_WIDTH, other=0.0)
    return values


# Of every 64 rows of a GEMM, a thread holds two rows that are 8 apart. Keys are read in an order in
# which these two rows are adjacent tokens. The thread can then store the softmax weights of the two
# tokens together for the second GEMM, which sums over tokens.
@triton.jit
def _by_rows(tokens):  # [TILE] in the order of tokens -> in the order of rows
    tile: tl.constexpr = tokens.shape[0]
    if tile % 64 == 0:
        tokens = tl.reshape(tokens, [4, 8, tile // 64, 2])
        tokens = tl.reshape(tl.permute(tokens, [2, 0, 3, 1]), [tile])
    return tokens


@triton.jit
def _by_tokens(rows):  # [TILE, N] in the order of rows -> in the order of tokens
    tile: tl.constexpr = rows.shape[0]
    width: tl.constexpr = rows.shape[1]
    if tile % 64 == 0:
        rows = tl.reshape(rows, [tile // 64, 4, 2, 8, width])
        rows = tl.reshape(tl.permute(rows, [1, 3, 0, 2, 4]), [tile, width])
    return rows


@triton.jit
def _split(x, CACHE_TYPE: tl.constexpr):  # float32 up to 448 -> two float8 codes
    # Convert through float16, which has enough bits for both terms. One instruction converts two
    # float16 numbers to float8.
    x = x.to(tl.float16)
    upper = narrow(x, CACHE_TYPE)
    lower = narrow(x - widen(upper, tl.float16), CACHE_TYPE)
    return upper.to(tl.uint8, bitcast=True), lower.to(tl.uint8, bitcast=True)


@triton.jit
def _operand(codes):
    # If the device cannot multiply float8, use float16, which can represent every float8 number.
    return widen(codes, tl.float16) if codes.dtype == tl.uint8 else codes


@triton.jit
def _as_columns(upper, lower, CACHE_TYPE: tl.constexpr):  # [N, HEADS] codes -> [N, 16]
    # Put both terms of a head in adjacent columns, so that one thread holds both sums of a head and
    # all threads hold the same number of heads.
    rows: tl.constexpr = upper.shape[0]
    width: tl.constexpr = 2 * upper.shape[1]
    columns = tl.reshape(tl.join(upper, lower), [rows, width])
    if width < 16:
        columns = tl.join(columns, tl.zeros([rows, width], tl.uint8))
        columns = tl.reshape(tl.permute(columns, [0, 2, 1]), [rows, 2 * width])
    # Convert codes to float8 last, because Triton might not find a layout for joining float8.
    return _operand(columns.to(CACHE_TYPE, bitcast=True))


@triton.jit
def _of_columns(sums, HEADS: tl.constexpr):  # [N, 16] -> [N, HEADS]
    rows: tl.constexpr = sums.shape[0]
    if HEADS < 8:
        sums = tl.permute(tl.reshape(sums, [rows, 2, 2 * HEADS]), [0, 2, 1])
        sums, _nothing = tl.split(sums)
    return tl.sum(tl.reshape(sums, [rows, HEADS, 2]), 2)
