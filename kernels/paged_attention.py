# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
# (A kernel's arguments are Triton's own values and mypy cannot type them: what they hold stands in
# the comment behind each. Compile-time constants are written as constants.)
"""Causal attention over a paged KV cache: any mix of prefill chunks and decodes in one call.

Formula, for the query token at position p of a sequence, head h, and the positions j it sees
(j <= p, and p - j < sliding_window where there is a window):

    s_j = scale * <q, k_j>                   softcap c > 0: s_j = c * tanh(s_j / c)
    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sinks[h]))      (the last term with sinks only)

Layout: `README.md` has shapes and strides. Query head h reads KV head h // (Hq / Hkv). The heads of
such a group are packed, next to each other, into the rows of one matrix product.

Two launches, each with its own shape of program, share the loop over the cache (`_attend`):

* `_decode_kernel` takes the sequences with one query token. A sequence's context is cut into equal
  pieces, one program each, and `_merge_kernel` joins the pieces. The piece's length is a constant,
  so that how a row is summed does not depend on what else is in the step (`_pieces` has the
  exception). A context of one piece is written at once.
* `_chunk_kernel` takes the sequences with more. One program has a tile of a sequence's query
  tokens and walks over all the positions that they see.

Every program finds its work in `query_starts` and `context_lens` on the device, and returns where
there is none. So a launch can be replayed with other lengths as long as the shapes of its tensors,
`num_splits`, and "is max_query_len over 1" stay the same.

Accumulation: scores, running maximum, sum and output in float32; the weights are rounded to the
cache's dtype for the product with V. float32 products are exact float32 (no TF32). Exponentials
are base 2, with log2(e) folded into the scale.

Sources: online softmax as in FlashAttention-2 (Dao 2023, arXiv:2307.08691); pieces of the context
as in Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); the block table of PagedAttention (Kwon et
al. 2023, arXiv:2309.06180); attention sinks as gpt-oss has them (OpenAI 2025, arXiv:2508.10925).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS, check_launchable

# Tokens of context that one decode program reads, at least. A multiple of every tile below.
DECODE_PIECE = 512
# The partial results of one call take at most this much memory; fewer, longer pieces beyond it.
MAX_WORKSPACE_BYTES = 256 * 2**20
# Keys and values of one tile take at most this much shared memory, per pipeline stage.
_TILE_BYTES = 32 * 2**10

_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class LaunchConfig:
    """The shape of one program. A function of the model's shape alone: same input, same bits."""

    rows: int  # query tokens x heads of a group, padded: the M of the matrix products
    tile: int  # tokens of context per turn of the loop
    num_warps: int
    num_stages: int


def paged_attention(
    query: torch.Tensor,  # [T, Hq, Dk], packed over sequences
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dk], any strides
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
    max_query_len: int,
    max_context_len: int,
    num_splits: int | None = None,
) -> None:
    """Attend, and write `out`. The step's own keys and values are in the cache already.

    `max_query_len` and `max_context_len` are upper bounds. `num_splits` is the most pieces that a
    decode's context is cut into (default: from `max_context_len`); every value gives the right
    result. A launch that is replayed fixes it. Rows of `query` past query_starts[S] are neither
    read nor written. A sequence may have no query token; one with one query token and a context
    of 0, which pads a fixed shape, gets zeros.
    """
    check_launchable(
        "paged_attention", query, key_cache, value_cache, block_tables, query_starts, context_lens,
        out, sinks,
    )  # fmt: skip
    num_sequences = context_lens.shape[0]
    if num_sequences == 0 or query.shape[0] == 0:
        return
    _check_shapes(query, key_cache, value_cache, block_tables, out)
    shared = _shared_arguments(
        query, key_cache, value_cache, block_tables, query_starts, context_lens, out, sinks,
        scale, sliding_window, softcap,
    )  # fmt: skip
    if num_splits is None:
        reach = min(max_context_len, sliding_window) if sliding_window else max_context_len
        num_splits = default_num_splits(num_sequences, query.shape[1], value_cache.shape[3], reach)
    _launch_decode(shared, query, value_cache, num_sequences, num_splits)
    if max_query_len > 1:
        _launch_chunks(shared, query, key_cache, num_sequences)


def default_num_splits(num_sequences: int, num_heads: int, value_width: int, reach: int) -> int:
    """Pieces of `DECODE_PIECE` tokens that cover `reach` tokens, as far as the workspace allows."""
    # One more than the division says: a window need not start where a piece does.
    wanted = -(-reach // DECODE_PIECE) + 1 if reach > DECODE_PIECE else 1
    affordable = MAX_WORKSPACE_BYTES // (4 * num_sequences * num_heads * (value_width + 2))
    return max(1, min(wanted, affordable))


def _check_shapes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
) -> None:
    assert query.shape[2] == key_cache.shape[3], "query and key differ in width"
    assert key_cache.shape[:3] == value_cache.shape[:3], "key and value caches differ in shape"
    assert query.shape[1] % key_cache.shape[1] == 0, "query heads do not divide into KV heads"
    assert out.shape == (*query.shape[:2], value_cache.shape[3]), "out has another shape"
    assert query.dtype == key_cache.dtype == value_cache.dtype, "query and cache differ in dtype"
    assert block_tables.stride(1) == 1, "a row of the block table must be contiguous"


def _shared_arguments(
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
) -> dict[str, Any]:
    """The arguments that both attention kernels take, by name."""
    _, num_kv_heads, block_size, key_width = key_cache.shape
    value_width = value_cache.shape[3]
    strides = {
        f"{name}_{axis}_stride": stride
        for name, tensor, axes in (
            ("query", query, ("row", "head", "width")),
            ("key", key_cache, ("slot", "head", "token", "width")),
            ("value", value_cache, ("slot", "head", "token", "width")),
            ("out", out, ("row", "head", "width")),
        )
        for axis, stride in zip(axes, tensor.stride(), strict=True)
    }
    # tanh(x) = 1 - 2 / (exp(2x) + 1): the kernel takes exp2 of (score_scale * <q, k>) either way.
    score_scale = scale * _LOG2E * (2.0 / softcap if softcap else 1.0)
    return strides | {
        "query_ptr": query,
        "key_ptr": key_cache,
        "value_ptr": value_cache,
        "table_ptr": block_tables,
        "query_starts_ptr": query_starts,
        "context_lens_ptr": context_lens,
        "out_ptr": out,
        "sinks_ptr": sinks,
        "table_stride": block_tables.stride(0),
        "score_scale": score_scale,
        "cap": softcap * _LOG2E,
        "window": sliding_window,
        "GROUP": query.shape[1] // num_kv_heads,
        "BLOCK_SIZE": block_size,
        "KEY_WIDTH": key_width,
        "VALUE_WIDTH": value_width,
        "KEY_BLOCK": _padded(key_width),
        "VALUE_BLOCK": _padded(value_width),
        "WINDOWED": sliding_window > 0,
        "CAPPED": softcap > 0.0,
    }


def _launch_decode(
    shared: dict[str, Any],
    query: torch.Tensor,
    value_cache: torch.Tensor,
    num_sequences: int,
    num_splits: int,
) -> None:
    """Attend for the sequences with one query token, in pieces, and merge the pieces."""
    num_heads, num_kv_heads = query.shape[1], value_cache.shape[1]
    config = decode_config(
        shared["GROUP"], shared["KEY_BLOCK"] + shared["VALUE_BLOCK"], query.element_size()
    )
    partials = (num_sequences, num_heads, num_splits) if num_splits > 1 else (1, 1, 1)
    partial_out = query.new_empty((*partials, value_cache.shape[3]), dtype=torch.float32)
    partial_max, partial_sum = query.new_empty((2, *partials), dtype=torch.float32).unbind()
    pieces = {
        "partial_out_ptr": partial_out,
        "partial_max_ptr": partial_max,
        "partial_sum_ptr": partial_sum,
        "max_pieces": num_splits,
        "PIECE": DECODE_PIECE,
        "TILE": config.tile,
    }
    _decode_kernel[(num_sequences, num_kv_heads, num_splits)](
        **shared,
        **pieces,
        ROWS=config.rows,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **OPTIONS,
    )
    if num_splits > 1:
        names = (
            "query_starts_ptr", "context_lens_ptr", "out_ptr", "out_row_stride", "out_head_stride",
            "out_width_stride", "window", "VALUE_WIDTH", "VALUE_BLOCK", "WINDOWED",
        )  # fmt: skip
        _merge_kernel[(num_sequences, num_heads)](
            **{name: shared[name] for name in names}, **pieces, num_warps=2, **OPTIONS
        )


def _launch_chunks(
    shared: dict[str, Any],
    query: torch.Tensor,
    key_cache: torch.Tensor,
    num_sequences: int,
) -> None:
    """Attend for the sequences with more than one query token."""
    num_tokens, num_kv_heads = query.shape[0], key_cache.shape[1]
    config = chunk_config(
        shared["GROUP"], shared["KEY_BLOCK"] + shared["VALUE_BLOCK"], query.element_size()
    )
    tokens = config.rows // shared["GROUP"]
    # The lengths are on the device, so this is the most tiles there can be (see `_find_sequence`).
    _chunk_kernel[(num_tokens // tokens + num_sequences, num_kv_heads)](
        **shared,
        num_sequences=num_sequences,
        TOKENS=tokens,
        ROWS=config.rows,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **OPTIONS,
    )


def decode_config(group: int, widths: int, element_size: int) -> LaunchConfig:
    """One query token: the rows are a group's heads, and 16 is the least that `tl.dot` takes."""
    return LaunchConfig(
        rows=_padded(group), tile=_tile(widths, element_size), num_warps=4, num_stages=3
    )


def chunk_config(group: int, widths: int, element_size: int) -> LaunchConfig:
    """Many query tokens: 64 rows, or one token's heads where a group has more than that."""
    return LaunchConfig(
        rows=max(64, _padded(group)),
        tile=_tile(widths, element_size),
        num_warps=4 if widths <= 256 else 8,
        num_stages=2,
    )


def _tile(widths: int, element_size: int) -> int:
    """Tokens per tile: a power of two, so that key and value of them fit `_TILE_BYTES`."""
    tokens = min(64, _TILE_BYTES // (widths * element_size))
    return max(16, 1 << (tokens.bit_length() - 1))


def _padded(size: int) -> int:
    """The power of two at or above `size` that `tl.dot` takes."""
    return max(16, 1 << (size - 1).bit_length())


@triton.jit
def _load_tokens(
    cache_ptr,  # [num_slots, block_size, D] of one KV head
    slots,  # [TILE] int64
    offsets,  # [TILE], in the block
    live,  # [TILE] bool
    slot_stride,
    token_stride,
    width_stride,
    WIDTH: tl.constexpr,  # D
    WIDTH_BLOCK: tl.constexpr,  # D, padded
):  # [TILE, WIDTH_BLOCK]
    # What is not live is 0 by selection. Multiplying it by a weight of 0 would not do: a slot holds
    # whatever its last user left, and 0 * NaN is NaN.
    columns = tl.arange(0, WIDTH_BLOCK)
    token_ptrs = cache_ptr + slots * slot_stride + offsets.to(tl.int64) * token_stride
    return tl.load(
        token_ptrs[:, None] + columns[None, :] * width_stride,
        mask=live[:, None] & (columns[None, :] < WIDTH),
        other=0.0,
    )


@triton.jit
def _attend(
    query,  # [ROWS, KEY_BLOCK]
    positions,  # [ROWS] int32, of each row's token
    begin,  # first and
    end,  # last + 1 position to read
    row_max,  # [ROWS] float32: the state so far
    row_sum,  # [ROWS] float32
    acc,  # [ROWS, VALUE_BLOCK] float32
    key_ptr,  # [num_slots, block_size, Dk] of the KV head
    value_ptr,  # [num_slots, block_size, Dv] of the KV head
    table_ptr,  # [max_blocks] int32, the sequence's
    key_slot_stride,
    key_token_stride,
    key_width_stride,
    value_slot_stride,
    value_token_stride,
    value_width_stride,
    score_scale,
    cap,
    window,
    BLOCK_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
):
    # Tiles lie at multiples of TILE, wherever the range begins: a tile then meets whole blocks.
    for tile in range(begin // TILE * TILE, end, TILE):
        tokens = tile + tl.arange(0, TILE)
        live = (tokens >= begin) & (tokens < end)
        slots = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        offsets = tokens % BLOCK_SIZE

        key = _load_tokens(
            key_ptr, slots, offsets, live, key_slot_stride, key_token_stride, key_width_stride,
            KEY_WIDTH, KEY_BLOCK,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * score_scale
        if CAPPED:
            scores = cap - 2.0 * cap / (tl.exp2(scores) + 1.0)
        visible = live[None, :] & (tokens[None, :] <= positions[:, None])
        if WINDOWED:
            visible = visible & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max

        value = _load_tokens(
            value_ptr, slots, offsets, live, value_slot_stride, value_token_stride,
            value_width_stride, VALUE_WIDTH, VALUE_BLOCK,
        )  # fmt: skip
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return row_max, row_sum, acc


@triton.jit
def _initial_state(
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
def _pieces(
    begin,  # first and
    end,  # last + 1 position that the token sees
    max_pieces,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    # PIECE tokens each, from a multiple of TILE on; longer ones only where max_pieces of them do
    # not reach the end. There is always a first piece, be it empty, since it writes the output.
    first = begin // TILE * TILE
    span = end - first
    length = tl.maximum(tl.cdiv(tl.cdiv(span, max_pieces), TILE) * TILE, PIECE)
    count = tl.maximum(tl.cdiv(span, length), 1)
    return first, length, count


@triton.jit(do_not_specialize=["table_stride", "max_pieces"])
def _decode_kernel(
    query_ptr,  # [T, Hq, Dk]
    key_ptr,  # [num_slots, Hkv, block_size, Dk]
    value_ptr,  # [num_slots, Hkv, block_size, Dv]
    table_ptr,  # [S, max_blocks] int32
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, Dv]
    sinks_ptr,  # [Hq] or None
    partial_out_ptr,  # [S, Hq, max_pieces, Dv] float32, not divided by the sum
    partial_max_ptr,  # [S, Hq, max_pieces] float32
    partial_sum_ptr,  # [S, Hq, max_pieces] float32
    query_row_stride,
    query_head_stride,
    query_width_stride,
    key_slot_stride,
    key_head_stride,
    key_token_stride,
    key_width_stride,
    value_slot_stride,
    value_head_stride,
    value_token_stride,
    value_width_stride,
    out_row_stride,
    out_head_stride,
    out_width_stride,
    table_stride,
    score_scale,
    cap,
    window,
    max_pieces,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    query_row = tl.load(query_starts_ptr + sequence).to(tl.int64)
    if tl.load(query_starts_ptr + sequence + 1) - query_row != 1:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    begin = tl.maximum(context_len - window, 0) if WINDOWED else 0
    first, length, count = _pieces(begin, context_len, max_pieces, PIECE, TILE)
    if piece >= count:
        return

    rows = tl.arange(0, ROWS)
    row_live = rows < GROUP
    heads = kv_head * GROUP + rows
    columns = tl.arange(0, KEY_BLOCK)
    query = tl.load(
        query_ptr
        + query_row * query_row_stride
        + heads[:, None] * query_head_stride
        + columns[None, :] * query_width_stride,
        mask=row_live[:, None] & (columns[None, :] < KEY_WIDTH),
        other=0.0,
    )
    # The sinks count once: the first piece has them. (`row_live & (piece == 0)` would be the same,
    # but Triton's interpreter makes integers of it.)
    holds_sinks = rows < tl.where(piece == 0, GROUP, 0)
    row_max, row_sum = _initial_state(sinks_ptr, heads, holds_sinks, ROWS)
    row_max, row_sum, acc = _attend(
        query,
        tl.zeros([ROWS], tl.int32) + context_len - 1,
        tl.maximum(begin, first + piece * length),
        tl.minimum(context_len, first + (piece + 1) * length),
        row_max,
        row_sum,
        tl.zeros([ROWS, VALUE_BLOCK], tl.float32),
        key_ptr + kv_head * key_head_stride,
        value_ptr + kv_head * value_head_stride,
        table_ptr + sequence.to(tl.int64) * table_stride,
        key_slot_stride, key_token_stride, key_width_stride,
        value_slot_stride, value_token_stride, value_width_stride,
        score_scale, cap, window,
        BLOCK_SIZE, KEY_WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
        WINDOWED, CAPPED, TILE,
    )  # fmt: skip

    columns = tl.arange(0, VALUE_BLOCK)
    mask = row_live[:, None] & (columns[None, :] < VALUE_WIDTH)
    if count == 1:
        out_ptrs = out_ptr + query_row * out_row_stride + heads[:, None] * out_head_stride
        result = _divide(acc, row_sum[:, None])
        tl.store(out_ptrs + columns[None, :] * out_width_stride, result, mask=mask)
    else:
        num_heads = tl.num_programs(1) * GROUP
        partials = (sequence.to(tl.int64) * num_heads + heads) * max_pieces + piece
        tl.store(partial_max_ptr + partials, row_max, mask=row_live)
        tl.store(partial_sum_ptr + partials, row_sum, mask=row_live)
        partial_ptrs = partial_out_ptr + partials[:, None] * VALUE_WIDTH + columns[None, :]
        tl.store(partial_ptrs, acc, mask=mask)


@triton.jit
def _divide(acc, row_sum):
    # Nothing seen (a padding row): zeros.
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)


@triton.jit(do_not_specialize=["max_pieces"])
def _merge_kernel(
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, Dv]
    partial_out_ptr,  # [S, Hq, max_pieces, Dv] float32
    partial_max_ptr,  # [S, Hq, max_pieces] float32
    partial_sum_ptr,  # [S, Hq, max_pieces] float32
    out_row_stride,
    out_head_stride,
    out_width_stride,
    window,
    max_pieces,
    VALUE_WIDTH: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    query_row = tl.load(query_starts_ptr + sequence).to(tl.int64)
    if tl.load(query_starts_ptr + sequence + 1) - query_row != 1:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    begin = tl.maximum(context_len - window, 0) if WINDOWED else 0
    _, _, count = _pieces(begin, context_len, max_pieces, PIECE, TILE)
    if count == 1:
        return

    columns = tl.arange(0, VALUE_BLOCK)
    mask = columns < VALUE_WIDTH
    partials = (sequence.to(tl.int64) * tl.num_programs(1) + head) * max_pieces
    total_max = tl.load(partial_max_ptr + partials)
    total_sum = tl.load(partial_sum_ptr + partials)
    acc = tl.load(partial_out_ptr + partials * VALUE_WIDTH + columns, mask=mask, other=0.0)
    for piece in range(1, count):
        partial = partials + piece
        piece_max = tl.load(partial_max_ptr + partial)
        new_max = tl.maximum(total_max, piece_max)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(total_max - shift)
        weight = tl.exp2(piece_max - shift)
        total_sum = total_sum * decay + tl.load(partial_sum_ptr + partial) * weight
        piece_out = tl.load(partial_out_ptr + partial * VALUE_WIDTH + columns, mask=mask, other=0.0)
        acc = acc * decay + piece_out * weight
        total_max = new_max

    out_ptrs = out_ptr + query_row * out_row_stride + head * out_head_stride
    result = _divide(acc, total_sum)
    tl.store(out_ptrs + columns * out_width_stride, result, mask=mask)


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
    key_slot_stride,
    key_head_stride,
    key_token_stride,
    key_width_stride,
    value_slot_stride,
    value_head_stride,
    value_token_stride,
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
    row_max, row_sum = _initial_state(sinks_ptr, heads, row_live, ROWS)
    _, row_sum, acc = _attend(
        query,
        computed + query_tokens,
        tl.maximum(computed + first - window + 1, 0) if WINDOWED else 0,
        computed + tl.minimum(first + TOKENS, query_len),
        row_max,
        row_sum,
        tl.zeros([ROWS, VALUE_BLOCK], tl.float32),
        key_ptr + kv_head * key_head_stride,
        value_ptr + kv_head * value_head_stride,
        table_ptr + sequence.to(tl.int64) * table_stride,
        key_slot_stride, key_token_stride, key_width_stride,
        value_slot_stride, value_token_stride, value_width_stride,
        score_scale, cap, window,
        BLOCK_SIZE, KEY_WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
        WINDOWED, CAPPED, TILE,
    )  # fmt: skip

    columns = tl.arange(0, VALUE_BLOCK)
    out_ptrs = out_ptr + (query_rows * out_row_stride + heads * out_head_stride)[:, None]
    tl.store(
        out_ptrs + columns[None, :] * out_width_stride,
        _divide(acc, row_sum[:, None]),
        mask=row_live[:, None] & (columns[None, :] < VALUE_WIDTH),
    )
