"""The chunked scan of Gated DeltaNet and Kimi Delta Attention over matrices in pool slots, for
sequences that have several tokens in the step.

Formula, for a chunk of a head with unit keys K [C, Dk], scaled unit queries Q, values V [C, Dv],
strengths b [C], the matrix M [Dk, Dv] before the chunk, and the sum G[i] of the logarithms of the
decays up to token i (one number, or one for each key channel):

    A[i, j] = b[i] sum over d of K[i, d] K[j, d] exp(G[i, d] - G[j, d])     for j < i
    P[i, j] =      sum over d of Q[i, d] K[j, d] exp(G[i, d] - G[j, d])     for j <= i
    D = (I + A)^-1 diag(b) (V - (K exp G) M)
    out = (Q exp G) M + P D
    M = exp(G[last]) M + (K exp(G[last] - G))^T D

D holds the delta that each token writes: b times the difference between the token's value and the
value that the matrix recalls for the token's key. The recalled value depends on the deltas of the
chunk's earlier tokens, so a linear system must be solved for D (UT transform; Yang et al. 2024,
https://arxiv.org/abs/2412.06464, https://arxiv.org/abs/2406.06484; Kimi Team 2025,
https://arxiv.org/abs/2510.26692). One kernel computes (I + A)^-1 diag(b) and P for all chunks in
parallel. Another kernel then computes the chunks of a sequence one after the other.

All exponents are at most 0. With a decay per channel, sums over channels become matrix
multiplications if exp(G[i] - G[j]) is split into the factors exp(G[i] - R) and exp(R - G[j]), where
R is G at a token between j and i. Chunks are cut into parts of 16 tokens. For tokens i and j in
different parts, R is G at the first token of i's part. For tokens in the same part, exp(G[i] -
G[j]) is computed for each pair.
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.chunk_scan import CHUNK, ScanWork, column_block, softplus, state_pointers
from batchinfer.kernels.gated_delta import GatedDeltaWeights
from batchinfer.kernels.launch import OPTIONS, compute_capability
from batchinfer.kernels.recurrent_state import PagedStates

_CHANNELS = 64  # key channels that a program multiplies at a time
_CHANNELS_BY_ROW = 32  # like _CHANNELS, if each channel has its own decay


def chunk_gated_delta(
    mixed: torch.Tensor,  # [T, channels] in the model's dtype, after the convolution
    decay: torch.Tensor,  # [T, H * decay_width]
    beta: torch.Tensor,  # [T, H]
    *,
    weights: GatedDeltaWeights,
    states: PagedStates,
    work: ScanWork,
    out: torch.Tensor,  # [T, H * Dv] float32
) -> None:
    """Scan the sequences of a work list, and update their states.

    Operands of matrix multiplications are rounded to the model's dtype; products are summed in
    float32.

    Args:
        out: outputs before the norm and the gate. Rows of sequences that are not in the work list
            are not written.
    """
    num_tokens, num_heads = beta.shape
    key_width, value_width = weights.key_width, out.shape[1] // num_heads
    solved, scores = mixed.new_empty(2, num_tokens, num_heads, CHUNK)
    scales = out.new_empty(num_tokens, num_heads, 4)
    by_row = weights.decay_width > 1
    totals, factors = scales, [mixed] * 3
    if by_row:
        totals = out.new_empty(num_tokens, num_heads * key_width)
        factors = [mixed.new_empty(totals.shape) for _ in range(3)]
    rows = max(16, triton.next_power_of_2(key_width))
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KEY_HEADS": weights.num_key_heads,
        "KEY_WIDTH": key_width,
        "VALUE_WIDTH": value_width,
        "BY_ROW": by_row,
        "CHUNK": CHUNK,
    }
    chunks, sequences = work.chunks, work.sequences
    _solve_chunks_kernel[(num_heads, len(chunks.items))](
        *(mixed, decay, beta, weights.decay_rate, weights.dt_bias),
        *(solved, scores, scales, totals, *factors),
        *(chunks.items, chunks.num_items, states.query_starts),
        *(decay.stride(0), beta.stride(0), weights.max_beta, key_width**-0.5),
        **constants,
        BLOCK_ROWS=min(rows, _CHANNELS_BY_ROW if by_row else _CHANNELS),
        LOG_CHUNK=CHUNK.bit_length() - 1,
        PRECISION="ieee" if mixed.dtype == torch.float32 else "tf32",
        num_warps=8 if by_row and compute_capability(mixed.device) >= 90 else 4,
        num_stages=1,
        **OPTIONS,
    )
    block = column_block(key_width, value_width)
    _chunk_gated_delta_kernel[(num_heads * triton.cdiv(value_width, block), len(sequences.items))](
        *(mixed, solved, scores, scales, totals, *factors, out),
        *(sequences.items, sequences.num_items),
        *(states.slots, states.tables, states.query_starts, states.context_lens),
        *(states.slots.stride(0), states.tables.stride(0), states.places.first),
        COLUMNS=states.places.columns,
        PER_SLOT=states.places.per_slot,
        BLOCK_ROWS=rows,
        BLOCK_COLUMNS=block,
        num_warps=8,
        num_stages=1,
        **constants,
        **OPTIONS,
    )


@triton.jit
def _solve_chunks_kernel(
    mixed_ptr,  # [T, queries, keys, values of all heads]
    decay_ptr,  # [T, NUM_HEADS], or [T, NUM_HEADS * KEY_WIDTH] if BY_ROW
    beta_ptr,  # [T, NUM_HEADS]
    decay_rate_ptr,  # [NUM_HEADS]
    dt_bias_ptr,  # [NUM_HEADS], or [NUM_HEADS * KEY_WIDTH] if BY_ROW
    solved_ptr,  # [T, NUM_HEADS, CHUNK] receives (I + A)^-1 diag(b)
    scores_ptr,  # [T, NUM_HEADS, CHUNK] receives P
    scales_ptr,  # [T, NUM_HEADS, 4] receives four factors for each token
    totals_ptr,  # [T, NUM_HEADS * KEY_WIDTH] receives G; only if BY_ROW
    reading_ptr,  # [T, NUM_HEADS * KEY_WIDTH] receives queries times exp(G); only if BY_ROW
    recalling_ptr,  # [T, NUM_HEADS * KEY_WIDTH] receives keys times exp(G); only if BY_ROW
    writing_ptr,  # [T, NUM_HEADS * KEY_WIDTH] receives keys times exp(G[last] - G); only if BY_ROW
    items_ptr,  # [max_items, 2] sequence, index of the chunk's first token in it
    num_items_ptr,  # [1]
    query_starts_ptr,
    decay_stride,
    beta_stride,
    max_beta,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program for each chunk and head.

    The four factors of a token scale, in this order: the key that recalls a value, the query, the
    key that writes the delta, and the matrix. The factors include decays unless BY_ROW.
    """
    num_keys: tl.constexpr = NUM_KEY_HEADS * KEY_WIDTH
    num_channels: tl.constexpr = 2 * num_keys + NUM_HEADS * VALUE_WIDTH
    head, item = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(num_items_ptr):
        return
    sequence = tl.load(items_ptr + 2 * item)
    begin = tl.load(query_starts_ptr + sequence) + tl.load(items_ptr + 2 * item + 1)
    count = tl.minimum(tl.load(query_starts_ptr + sequence + 1) - begin, CHUNK)
    places = tl.arange(0, CHUNK)
    is_token = places < count
    first = begin.to(tl.int64)
    queries = mixed_ptr + first * num_channels + head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_WIDTH
    keys, totals = queries + num_keys, totals_ptr + (first * NUM_HEADS + head) * KEY_WIDTH
    rate = tl.load(decay_rate_ptr + head)
    similar = tl.zeros([CHUNK, CHUNK], tl.float32)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    key_squares, query_squares = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for first_row in range(0, KEY_WIDTH, BLOCK_ROWS):
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        mask = is_token[:, None] & (rows < KEY_WIDTH)[None, :]
        offsets = places[:, None] * num_channels + rows[None, :]
        query = tl.load(queries + offsets, mask=mask, other=0.0)
        key = tl.load(keys + offsets, mask=mask, other=0.0)
        key_squares += _squares(key)
        query_squares += _squares(query)
        if BY_ROW:
            bias = tl.load(dt_bias_ptr + head * KEY_WIDTH + rows, mask=rows < KEY_WIDTH, other=0.0)
            decays = decay_ptr + first * decay_stride + head * KEY_WIDTH
            decays += places[:, None] * decay_stride + rows[None, :]
            step = softplus(tl.load(decays, mask=mask, other=0.0).to(tl.float32) + bias[None, :])
            total = tl.cumsum(tl.where(mask, -rate * step, 0.0), axis=0)
            total_stride: tl.constexpr = NUM_HEADS * KEY_WIDTH
            outs = (first + places[:, None]) * total_stride + head * KEY_WIDTH + rows[None, :]
            tl.store(totals_ptr + outs, total, mask=mask)
            last = tl.sum(tl.where((places == CHUNK - 1)[:, None], total, 0.0), axis=0)
            kept = tl.exp(total)
            tl.store(reading_ptr + outs, query.to(tl.float32) * kept, mask=mask)
            tl.store(recalling_ptr + outs, key.to(tl.float32) * kept, mask=mask)
            kept = tl.exp(last[None, :] - total)
            tl.store(writing_ptr + outs, key.to(tl.float32) * kept, mask=mask)
            tl.debug_barrier()  # other threads read these rows
            similar, scores = _add_products_by_row(
                similar, scores, query, key, total, rows, keys, totals, count,
                num_channels, total_stride, KEY_WIDTH, CHUNK,
            )  # fmt: skip
        else:
            similar = tl.dot(key, tl.trans(key), similar, input_precision="ieee")
            scores = tl.dot(query, tl.trans(key), scores, input_precision="ieee")
    query_scale = scale / tl.sqrt(query_squares + 1e-6)
    key_scale = 1.0 / tl.sqrt(key_squares + 1e-6)
    scales = scales_ptr + ((first + places) * NUM_HEADS + head) * 4
    if BY_ROW:
        tl.store(scales, key_scale, mask=is_token)
        tl.store(scales + 1, query_scale, mask=is_token)
        tl.store(scales + 2, key_scale, mask=is_token)
    else:
        bias = tl.load(dt_bias_ptr + head)
        step = tl.load(decay_ptr + (first + places) * decay_stride + head, mask=is_token, other=0.0)
        step = tl.where(is_token, softplus(step.to(tl.float32) + bias), 0.0)
        total = tl.cumsum(-rate * step, axis=0)
        last = tl.sum(tl.where(places == CHUNK - 1, total, 0.0), axis=0)
        kept = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
        similar *= kept
        scores *= kept
        tl.store(scales, key_scale * tl.exp(total), mask=is_token)
        tl.store(scales + 1, query_scale * tl.exp(total), mask=is_token)
        tl.store(scales + 2, key_scale * tl.exp(last - total), mask=is_token)
        tl.store(scales + 3, tl.zeros([CHUNK], tl.float32) + tl.exp(last), mask=is_token)
    strength = tl.load(beta_ptr + (first + places) * beta_stride + head, mask=is_token, other=0.0)
    strength = tl.where(is_token, tl.sigmoid(strength.to(tl.float32)) * max_beta, 0.0)
    later, earlier = places[:, None], places[None, :]
    scores = tl.where(later >= earlier, scores * query_scale[:, None] * key_scale[None, :], 0.0)
    similar *= (strength * key_scale)[:, None] * key_scale[None, :]
    similar = tl.where(later > earlier, similar, 0.0)
    outs = ((first + later) * NUM_HEADS + head) * CHUNK + earlier
    tl.store(scores_ptr + outs, scores, mask=is_token[:, None])
    solved = _inverse(similar, CHUNK, LOG_CHUNK, PRECISION)
    tl.store(solved_ptr + outs, solved * strength[None, :], mask=is_token[:, None])


@triton.jit
def _squares(x):
    x = x.to(tl.float32)
    return tl.sum(x * x, axis=1)


@triton.jit
def _add_products_by_row(
    similar,  # [CHUNK, CHUNK] sums of products of keys with keys
    scores,  # [CHUNK, CHUNK] sums of products of queries with keys
    query,  # [CHUNK, BLOCK_ROWS]
    key,  # [CHUNK, BLOCK_ROWS]
    total,  # [CHUNK, BLOCK_ROWS] G
    rows,  # [BLOCK_ROWS] channels
    keys,  # pointer to the chunk's first key
    totals,  # pointer to the chunk's first row of G
    count,  # tokens of the chunk
    key_stride,
    total_stride,
    KEY_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add the products of BLOCK_ROWS channels, each with its decay. Products with later tokens are
    wrong; the caller must mask them."""
    dtype: tl.constexpr = key.dtype
    key, query = key.to(tl.float32), query.to(tl.float32)
    places, mask = tl.arange(0, CHUNK), (rows < KEY_WIDTH)[None, :]
    part = places // 16
    # Products with tokens of earlier parts of 16 tokens. ``meets`` is the offset of R (see the
    # module's docstring), which is G at the first token of the later token's part.
    meets = tl.minimum(part * 16, count - 1)[:, None] * total_stride + rows[None, :]
    since = tl.exp(tl.minimum(total - tl.load(totals + meets, mask=mask, other=0.0), 0.0))
    key_since, query_since = (key * since).to(dtype), (query * since).to(dtype)
    for number in range(1, CHUNK // 16):
        at = tl.minimum(number * 16, count - 1) * total_stride + rows
        meet = tl.load(totals + at, mask=rows < KEY_WIDTH, other=0.0)[None, :]
        until = key * tl.exp(tl.minimum(meet - total, 0.0))
        until = tl.trans(tl.where((part < number)[:, None], until, 0.0).to(dtype))
        in_part = (part == number)[:, None]
        similar += tl.where(in_part, tl.dot(key_since, until, input_precision="ieee"), 0.0)
        scores += tl.where(in_part, tl.dot(query_since, until, input_precision="ieee"), 0.0)
    # Products within a part: each iteration multiplies every token by token `number` of its part.
    for number in range(16):
        other = tl.minimum(part * 16 + number, count - 1)[:, None]
        decayed = tl.load(totals + other * total_stride + rows[None, :], mask=mask, other=0.0)
        decayed = tl.exp(tl.minimum(total - decayed, 0.0))
        decayed *= tl.load(keys + other * key_stride + rows[None, :], mask=mask, other=0.0)
        is_other = places[None, :] == (part * 16 + number)[:, None]
        similar += tl.where(is_other, tl.sum(key * decayed, axis=1)[:, None], 0.0)
        scores += tl.where(is_other, tl.sum(query * decayed, axis=1)[:, None], 0.0)
    return similar, scores


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr, LOG_CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + lower [CHUNK, CHUNK], where `lower` is 0 on and above the diagonal.

    The inverses of two diagonal blocks give the inverse of a block twice as large:
    [[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]].
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    joined = (row >> 1 == column >> 1) & (row > column)
    inverse = tl.where(row == column, 1.0, tl.where(joined, -lower, 0.0))
    for level in range(1, LOG_CHUNK):
        joined = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        below = tl.dot(tl.where(joined, lower, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, below, input_precision=PRECISION)
    return inverse


@triton.jit
def _chunk_gated_delta_kernel(
    mixed_ptr,  # [T, queries, keys, values of all heads]
    solved_ptr,  # [T, NUM_HEADS, CHUNK]
    scores_ptr,  # [T, NUM_HEADS, CHUNK]
    scales_ptr,  # [T, NUM_HEADS, 4]
    totals_ptr,  # [T, NUM_HEADS * KEY_WIDTH] G; only if BY_ROW
    reading_ptr,  # [T, NUM_HEADS * KEY_WIDTH] queries times exp(G); only if BY_ROW
    recalling_ptr,  # [T, NUM_HEADS * KEY_WIDTH] keys times exp(G); only if BY_ROW
    writing_ptr,  # [T, NUM_HEADS * KEY_WIDTH] keys times exp(G[last] - G); only if BY_ROW
    out_ptr,  # [T, NUM_HEADS * VALUE_WIDTH]
    items_ptr,  # [max_items, 2] sequence; the second column is 0
    num_items_ptr,  # [1]
    slots_ptr,
    tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    slot_stride,
    table_stride,
    first,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BY_ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_SLOT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program for each sequence and block of columns of a head's matrix."""
    blocks: tl.constexpr = (VALUE_WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    num_keys: tl.constexpr = NUM_KEY_HEADS * KEY_WIDTH
    num_values: tl.constexpr = NUM_HEADS * VALUE_WIDTH
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    num_channels: tl.constexpr = 2 * num_keys + num_values
    head, item = tl.program_id(0) // blocks, tl.program_id(1)
    if item >= tl.load(num_items_ptr):
        return
    sequence = tl.load(items_ptr + 2 * item)
    start = tl.load(query_starts_ptr + sequence).to(tl.int64)
    count = (tl.load(query_starts_ptr + sequence + 1) - start).to(tl.int32)
    places, rows = tl.arange(0, CHUNK), tl.arange(0, BLOCK_ROWS)
    within = tl.program_id(0) % blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask, row_mask = within < VALUE_WIDTH, rows < KEY_WIDTH
    columns = head * VALUE_WIDTH + tl.minimum(within, VALUE_WIDTH - 1)
    state = state_pointers(
        slots_ptr,
        tables_ptr,
        sequence,
        columns,
        rows,
        slot_stride,
        table_stride,
        first,
        KEY_WIDTH,
        COLUMNS,
        PER_SLOT,
    )
    mask = row_mask[:, None] & column_mask[None, :]
    has_state = tl.load(context_lens_ptr + sequence) > count
    matrix = tl.where(has_state, tl.load(state, mask=mask, other=0.0), 0.0)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    for begin in range(0, count, CHUNK):
        is_token = begin + places < count
        tokens = start + begin + places
        load_mask = is_token[:, None] & row_mask[None, :]
        value_mask = is_token[:, None] & column_mask[None, :]
        inputs = mixed_ptr + tokens[:, None] * num_channels
        if BY_ROW:
            at_key = (tokens[:, None] * NUM_HEADS + head) * KEY_WIDTH + rows[None, :]
            queries, keys = reading_ptr + at_key, recalling_ptr + at_key
        else:
            queries = inputs + key_head * KEY_WIDTH + rows[None, :]
            keys = queries + num_keys
        query = tl.load(queries, mask=load_mask, other=0.0)
        key = tl.load(keys, mask=load_mask, other=0.0)
        scales = scales_ptr + (tokens * NUM_HEADS + head) * 4
        products = (tokens[:, None] * NUM_HEADS + head) * CHUNK + places[None, :]
        rounded = matrix.to(dtype)
        recalled = tl.dot(key, rounded, input_precision="ieee")
        recalled *= tl.load(scales, mask=is_token, other=0.0)[:, None]
        out = tl.dot(query, rounded, input_precision="ieee")
        out *= tl.load(scales + 1, mask=is_token, other=0.0)[:, None]
        values = inputs + 2 * num_keys + head * VALUE_WIDTH + within[None, :]
        delta = tl.load(values, mask=value_mask, other=0.0).to(tl.float32) - recalled
        solved = tl.load(solved_ptr + products, mask=is_token[:, None], other=0.0)
        delta = tl.dot(solved, delta.to(dtype), input_precision="ieee")
        scores = tl.load(scores_ptr + products, mask=is_token[:, None], other=0.0)
        out = tl.dot(scores, delta.to(dtype), out, input_precision="ieee")
        outs = out_ptr + tokens[:, None] * num_values + head * VALUE_WIDTH + within[None, :]
        tl.store(outs, out, mask=value_mask)
        delta *= tl.load(scales + 2, mask=is_token, other=0.0)[:, None]
        key_mask = is_token[None, :] & row_mask[:, None]
        # Loading the keys again in transposed order is cheaper than transposing the loaded keys.
        if BY_ROW:
            keys = writing_ptr + (tokens[None, :] * NUM_HEADS + head) * KEY_WIDTH + rows[:, None]
            final = start + tl.minimum(begin + CHUNK, count) - 1
            lasts = totals_ptr + (final * NUM_HEADS + head) * KEY_WIDTH + rows
            matrix *= tl.exp(tl.load(lasts, mask=row_mask, other=0.0))[:, None]
        else:
            keys = mixed_ptr + tokens[None, :] * num_channels + num_keys + key_head * KEY_WIDTH
            keys += rows[:, None]
            matrix *= tl.load(scales_ptr + ((start + begin) * NUM_HEADS + head) * 4 + 3)
        key = tl.load(keys, mask=key_mask, other=0.0)
        matrix = tl.dot(key, delta.to(dtype), matrix, input_precision="ieee")
    # Compute the state's pointers again. Keeping these pointers would leave too few registers for
    # the loop.
    state = state_pointers(
        slots_ptr,
        tables_ptr,
        sequence,
        columns,
        rows,
        slot_stride,
        table_stride,
        first,
        KEY_WIDTH,
        COLUMNS,
        PER_SLOT,
    )
    tl.store(state, matrix, mask=mask)
