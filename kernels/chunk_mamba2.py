"""Mamba-2's chunked scan over matrices in pool slots, for sequences that have several tokens in the
step.

Formula, for a chunk of L tokens and a head, with values X [L, P], B and C [L, N] of the head's
group, time steps d [L], the matrix M [N, P] before the chunk, and
G[i] = -decay_rate (d[0] + ... + d[i]):

    Y = diag(exp G) C M + W X + skip X     W[i, j] = exp(G[i] - G[j]) d[j] (C B^T)[i, j] for j <= i
    M = exp(G[last]) M + B^T diag(d exp(G[last] - G)) X

This is the state-space dual form (Dao and Gu 2024, https://arxiv.org/abs/2405.21060, section 6).
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.chunk_scan import CHUNK, ScanWork, column_block, softplus, state_pointers
from batchinfer.kernels.launch import OPTIONS
from batchinfer.kernels.mamba2 import Mamba2Weights
from batchinfer.kernels.recurrent_state import PagedStates

_HEADS = 16  # heads per program of `_sum_steps_kernel`
_ROWS = 64  # elements of B and C that are multiplied at a time


def chunk_mamba2(
    mixed: torch.Tensor,  # [T, channels] in the model's dtype, after the convolution
    dt: torch.Tensor,  # [T, H]
    *,
    weights: Mamba2Weights,
    states: PagedStates,
    work: ScanWork,
    out: torch.Tensor,  # [T, H * P] float32
) -> None:
    """Scan the sequences of a work list, and update their states.

    Operands of matrix multiplications are rounded to the model's dtype; products are summed in
    float32.

    Args:
        out: outputs before the gate and the norm. Rows of sequences that are not in the work list
            are not written.
    """
    num_heads, num_values = dt.shape[1], out.shape[1]
    width, items = num_values // num_heads, work.sequences.items
    block = column_block(weights.state_size, width)
    chunks = work.chunks
    steps, totals = out.new_empty(2, len(dt), num_heads)
    _sum_steps_kernel[(triton.cdiv(num_heads, _HEADS), len(chunks.items))](
        *(dt, weights.decay_rate, weights.dt_bias, steps, totals),
        *(chunks.items, chunks.num_items, states.query_starts),
        *(dt.stride(0), *weights.dt_limits),
        NUM_HEADS=num_heads,
        BLOCK_HEADS=_HEADS,
        CHUNK=CHUNK,
        **OPTIONS,
    )
    products = mixed.new_empty(len(dt), weights.num_groups, CHUNK)
    rows = max(16, triton.next_power_of_2(weights.state_size))
    _multiply_chunks_kernel[(weights.num_groups, len(chunks.items))](
        *(mixed, products, chunks.items, chunks.num_items, states.query_starts),
        NUM_GROUPS=weights.num_groups,
        STATE_SIZE=weights.state_size,
        NUM_VALUES=num_values,
        BLOCK_ROWS=min(rows, _ROWS),
        CHUNK=CHUNK,
        num_stages=1,
        **OPTIONS,
    )
    _chunk_mamba2_kernel[(num_heads * triton.cdiv(width, block), len(items))](
        *(mixed, products, steps, totals, out, weights.skip),
        *(items, work.sequences.num_items),
        *(states.slots, states.tables, states.query_starts, states.context_lens),
        *(states.slots.stride(0), states.tables.stride(0), states.places.first),
        NUM_HEADS=num_heads,
        NUM_GROUPS=weights.num_groups,
        STATE_SIZE=weights.state_size,
        HEAD_WIDTH=width,
        COLUMNS=states.places.columns,
        PER_SLOT=states.places.per_slot,
        BLOCK_ROWS=rows,
        BLOCK_COLUMNS=block,
        CHUNK=CHUNK,
        num_warps=8,
        num_stages=1,
        **OPTIONS,
    )


@triton.jit
def _sum_steps_kernel(
    dt_ptr,  # [T, NUM_HEADS]
    decay_rate_ptr,  # [NUM_HEADS]
    dt_bias_ptr,  # [NUM_HEADS]
    steps_ptr,  # [T, NUM_HEADS] receives d
    totals_ptr,  # [T, NUM_HEADS] receives G
    items_ptr,  # [max_items, 2] sequence, index of the chunk's first token in it
    num_items_ptr,  # [1]
    query_starts_ptr,
    dt_stride,
    min_dt,
    max_dt,
    NUM_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program for each chunk and block of heads."""
    item = tl.program_id(1)
    if item >= tl.load(num_items_ptr):
        return
    sequence = tl.load(items_ptr + 2 * item)
    begin = tl.load(query_starts_ptr + sequence) + tl.load(items_ptr + 2 * item + 1)
    tokens = begin.to(tl.int64) + tl.arange(0, CHUNK)
    heads = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = heads < NUM_HEADS
    is_token = tokens < tl.load(query_starts_ptr + sequence + 1)
    mask = is_token[:, None] & is_head[None, :]
    rate = tl.load(decay_rate_ptr + heads, mask=is_head, other=0.0)
    bias = tl.load(dt_bias_ptr + heads, mask=is_head, other=0.0)
    dt = tl.load(dt_ptr + tokens[:, None] * dt_stride + heads[None, :], mask=mask, other=0.0)
    step = softplus(dt.to(tl.float32) + bias[None, :])
    step = tl.where(mask, tl.minimum(tl.maximum(step, min_dt), max_dt), 0.0)
    outs = tokens[:, None] * NUM_HEADS + heads[None, :]
    tl.store(steps_ptr + outs, step, mask=mask)
    tl.store(totals_ptr + outs, tl.cumsum(-rate[None, :] * step, axis=0), mask=mask)


@triton.jit
def _multiply_chunks_kernel(
    mixed_ptr,  # [T, values of all heads, B and C of all groups]
    products_ptr,  # [T, NUM_GROUPS, CHUNK] receives C B^T
    items_ptr,  # [max_items, 2] sequence, index of the chunk's first token in it
    num_items_ptr,  # [1]
    query_starts_ptr,
    NUM_GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program for each chunk and group."""
    num_writes: tl.constexpr = NUM_GROUPS * STATE_SIZE
    num_channels: tl.constexpr = NUM_VALUES + 2 * num_writes
    group, item = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(num_items_ptr):
        return
    sequence = tl.load(items_ptr + 2 * item)
    begin = tl.load(query_starts_ptr + sequence) + tl.load(items_ptr + 2 * item + 1)
    places, first = tl.arange(0, CHUNK), begin.to(tl.int64)
    is_token = begin + places < tl.load(query_starts_ptr + sequence + 1)
    writes = mixed_ptr + first * num_channels + NUM_VALUES + group * STATE_SIZE
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first_row in range(0, STATE_SIZE, BLOCK_ROWS):
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        offsets = places[:, None] * num_channels + rows[None, :]
        mask = is_token[:, None] & (rows < STATE_SIZE)[None, :]
        write = tl.load(writes + offsets, mask=mask, other=0.0)
        read = tl.load(writes + num_writes + offsets, mask=mask, other=0.0)
        products = tl.dot(read, tl.trans(write), products, input_precision="ieee")
    outs = ((first + places[:, None]) * NUM_GROUPS + group) * CHUNK + places[None, :]
    tl.store(products_ptr + outs, products, mask=is_token[:, None])


@triton.jit
def _chunk_mamba2_kernel(
    mixed_ptr,  # [T, values of all heads, B and C of all groups]
    products_ptr,  # [T, NUM_GROUPS, CHUNK] C B^T
    steps_ptr,  # [T, NUM_HEADS] d
    totals_ptr,  # [T, NUM_HEADS] G
    out_ptr,  # [T, NUM_HEADS * HEAD_WIDTH]
    skip_ptr,  # [NUM_HEADS]
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
    NUM_GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_SLOT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program for each sequence and block of columns of a head's matrix."""
    blocks: tl.constexpr = (HEAD_WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    num_values: tl.constexpr = NUM_HEADS * HEAD_WIDTH
    num_writes: tl.constexpr = NUM_GROUPS * STATE_SIZE
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    num_channels: tl.constexpr = num_values + 2 * num_writes
    head, item = tl.program_id(0) // blocks, tl.program_id(1)
    if item >= tl.load(num_items_ptr):
        return
    sequence = tl.load(items_ptr + 2 * item)
    start = tl.load(query_starts_ptr + sequence).to(tl.int64)
    count = (tl.load(query_starts_ptr + sequence + 1) - start).to(tl.int32)
    places, rows = tl.arange(0, CHUNK), tl.arange(0, BLOCK_ROWS)
    within = tl.program_id(0) % blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask, row_mask = within < HEAD_WIDTH, rows < STATE_SIZE
    columns = head * HEAD_WIDTH + tl.minimum(within, HEAD_WIDTH - 1)
    state = state_pointers(
        slots_ptr,
        tables_ptr,
        sequence,
        columns,
        rows,
        slot_stride,
        table_stride,
        first,
        STATE_SIZE,
        COLUMNS,
        PER_SLOT,
    )
    mask = row_mask[:, None] & column_mask[None, :]
    has_state = tl.load(context_lens_ptr + sequence) > count
    matrix = tl.where(has_state, tl.load(state, mask=mask, other=0.0), 0.0)
    skip = tl.load(skip_ptr + head)
    group = head // (NUM_HEADS // NUM_GROUPS)
    is_seen = places[:, None] >= places[None, :]
    for begin in range(0, count, CHUNK):
        is_token = begin + places < count
        tokens = start + begin + places
        inputs = mixed_ptr + tokens[:, None] * num_channels
        value_mask = is_token[:, None] & column_mask[None, :]
        value = inputs + head * HEAD_WIDTH + within[None, :]
        value = tl.load(value, mask=value_mask, other=0.0)
        step = tl.load(steps_ptr + tokens * NUM_HEADS + head, mask=is_token, other=0.0)
        final = start + tl.minimum(begin + CHUNK, count) - 1
        last = tl.load(totals_ptr + final * NUM_HEADS + head)
        total = tl.load(totals_ptr + tokens * NUM_HEADS + head, mask=is_token, other=0.0)
        total = tl.where(is_token, total, last)
        products = (tokens[:, None] * NUM_GROUPS + group) * CHUNK + places[None, :]
        scores = tl.load(products_ptr + products, mask=is_token[:, None], other=0.0)
        kept = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)) * step[None, :]
        scores = tl.where(is_seen, scores.to(tl.float32) * kept, 0.0).to(dtype)
        reads = inputs + num_values + num_writes + group * STATE_SIZE + rows[None, :]
        read = tl.load(reads, mask=is_token[:, None] & row_mask[None, :], other=0.0)
        out = tl.dot(read, matrix.to(dtype), input_precision="ieee") * tl.exp(total)[:, None]
        out = tl.dot(scores, value, out, input_precision="ieee")
        out += skip * value.to(tl.float32)
        outs = out_ptr + tokens[:, None] * num_values + head * HEAD_WIDTH + within[None, :]
        tl.store(outs, out, mask=value_mask)
        new = (value.to(tl.float32) * (step * tl.exp(last - total))[:, None]).to(dtype)
        writes = mixed_ptr + tokens[None, :] * num_channels + num_values + group * STATE_SIZE
        writes += rows[:, None]
        write = tl.load(writes, mask=is_token[None, :] & row_mask[:, None], other=0.0)
        matrix = tl.dot(write, new, matrix * tl.exp(last), input_precision="ieee")
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
        STATE_SIZE,
        COLUMNS,
        PER_SLOT,
    )
    tl.store(state, matrix, mask=mask)
