"""Recurrences over matrices in pool slots, token by token, for Gated DeltaNet, Kimi Delta
Attention, Mamba-2 and Mamba-1.

A program keeps some columns of a head's matrix in registers while it computes a sequence's tokens
one after the other. A sequence's bits therefore depend neither on how the sequence is cut into
steps nor on other sequences. With a work list (`PagedStates.scan_work`), chunked scans compute the
sequences that have more than one token in the step. The bits of these sequences depend on where
chunks begin: at the sequence's first token in the step, and then every 64 tokens.

References: `gated_delta.py`, `mamba2.py` and `mamba1.py`, with the same arguments.
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.chunk_gated_delta import chunk_gated_delta
from batchinfer.kernels.chunk_mamba2 import chunk_mamba2
from batchinfer.kernels.chunk_scan import softplus
from batchinfer.kernels.gated_delta import GatedDeltaWeights
from batchinfer.kernels.gated_norm import gated_norm
from batchinfer.kernels.launch import OPTIONS, check_launchable
from batchinfer.kernels.mamba1 import Mamba1Weights
from batchinfer.kernels.mamba2 import Mamba2Weights
from batchinfer.kernels.recurrent_conv import recurrent_conv
from batchinfer.kernels.recurrent_state import PagedStates

_MAX_COLUMNS = 32  # columns per program, at most


def gated_delta(
    qkv: torch.Tensor,  # [T, channels], last dimension contiguous, like all inputs
    gate: torch.Tensor,  # [T, Hv * Dv]
    decay: torch.Tensor,  # [T, Hv * decay_width]
    beta: torch.Tensor,  # [T, Hv]
    *,
    weights: GatedDeltaWeights,
    states: PagedStates,
    out: torch.Tensor,  # [T, Hv * Dv], contiguous
) -> None:
    """Run packed sequences through a Gated DeltaNet or KDA layer, and update their states."""
    mixed = recurrent_conv(qkv, weights.conv, None, states=states, dtype=qkv.dtype)
    num_heads, value_width = beta.shape[1], len(weights.norm)
    read = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    constants = weights.decay_rate, weights.dt_bias
    check_launchable("gated_delta", mixed, decay, beta, read, *constants, states.slots)
    if len(qkv) == 0:
        return
    if (work := states.scan_work) is not None:
        chunk_gated_delta(mixed, decay, beta, weights=weights, states=states, work=work, out=read)
    grid, places = _grid(states, num_heads, value_width)
    _gated_delta_kernel[grid](
        *(mixed, decay, beta, read, *constants),
        *(states.slots, states.tables, states.query_starts, states.context_lens),
        *(decay.stride(0), beta.stride(0), states.slots.stride(0), states.tables.stride(0)),
        *(states.places.first, weights.max_beta, weights.key_width**-0.5),
        NUM_HEADS=num_heads,
        NUM_KEY_HEADS=weights.num_key_heads,
        KEY_WIDTH=weights.key_width,
        VALUE_WIDTH=value_width,
        DECAY_WIDTH=weights.decay_width,
        BLOCK_ROWS=triton.next_power_of_2(weights.key_width),
        MOST_TOKENS=1 if work is not None else 1 << 30,
        **places,
        **OPTIONS,
    )
    gated_norm(
        *(read, gate, weights.norm),
        width=value_width,
        eps=weights.norm_eps,
        with_silu=weights.with_silu,
        out=out,
    )


def mamba2(
    values: torch.Tensor,  # [T, channels], last dimension contiguous, like all inputs
    gate: torch.Tensor,  # [T, H * P]
    dt: torch.Tensor,  # [T, H]
    *,
    weights: Mamba2Weights,
    states: PagedStates,
    out: torch.Tensor,  # [T, H * P], contiguous
) -> None:
    """Run packed sequences through a Mamba-2 layer and update their states in place."""
    mixed = recurrent_conv(
        *(values, weights.conv, weights.conv_bias), states=states, dtype=values.dtype
    )
    num_heads = dt.shape[1]
    head_width = out.shape[1] // num_heads
    read = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    constants = weights.decay_rate, weights.dt_bias, weights.skip
    check_launchable("mamba2", mixed, dt, read, *constants, states.slots)
    if len(values) == 0:
        return
    if (work := states.scan_work) is not None:
        chunk_mamba2(mixed, dt, weights=weights, states=states, work=work, out=read)
    grid, places = _grid(states, num_heads, head_width)
    _mamba2_kernel[grid](
        *(mixed, dt, read, *constants),
        *(states.slots, states.tables, states.query_starts, states.context_lens),
        *(dt.stride(0), states.slots.stride(0), states.tables.stride(0)),
        *(states.places.first, *weights.dt_limits),
        NUM_HEADS=num_heads,
        NUM_GROUPS=weights.num_groups,
        STATE_SIZE=weights.state_size,
        HEAD_WIDTH=head_width,
        BLOCK_ROWS=triton.next_power_of_2(weights.state_size),
        MOST_TOKENS=1 if work is not None else 1 << 30,
        **places,
        **OPTIONS,
    )
    gated_norm(
        *(read, gate, weights.norm),
        width=weights.norm_width,
        eps=weights.norm_eps,
        gate_first=weights.gate_first,
        out=out,
    )


def mamba1(
    values: torch.Tensor,  # [T, C], after the convolution
    dt: torch.Tensor,  # [T, C]
    write: torch.Tensor,  # [T, N]
    read: torch.Tensor,  # [T, N]
    gate: torch.Tensor,  # [T, C]
    *,
    weights: Mamba1Weights,
    states: PagedStates,
    out: torch.Tensor,  # [T, C]
) -> None:
    """Run packed sequences through a Mamba-1 layer after its convolution, and update their
    states."""
    inputs, constants = (values, dt, write, read, gate), (weights.decay_rate, weights.skip)
    check_launchable("mamba1", *inputs, *constants, states.slots, out)
    if len(values) == 0:
        return
    state_size, num_channels = weights.decay_rate.shape
    grid, places = _grid(states, 1, num_channels)
    _mamba1_kernel[grid](
        *(*inputs, out, *constants),
        *(states.slots, states.tables, states.query_starts, states.context_lens),
        *(tensor.stride(0) for tensor in (*inputs, out)),
        *(states.slots.stride(0), states.tables.stride(0), states.places.first),
        NUM_CHANNELS=num_channels,
        STATE_SIZE=state_size,
        BLOCK_ROWS=triton.next_power_of_2(state_size),
        **places,
        **OPTIONS,
    )


def _grid(
    states: PagedStates, num_heads: int, width: int
) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the kernel's constants and the launch grid, which has a program for each sequence and
    each block of a piece's columns."""
    places = states.places
    block = min(_MAX_COLUMNS, triton.next_power_of_2(places.columns))
    blocks = triton.cdiv(places.columns, block)
    grid = len(states.context_lens), num_heads * width // places.columns * blocks
    constants = {"COLUMNS": places.columns, "PER_SLOT": places.per_slot, "BLOCK_COLUMNS": block}
    return grid, constants


@triton.jit
def _block_of(
    slots_ptr,
    tables_ptr,
    sequence,
    slot_stride,
    table_stride,
    first,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_SLOT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Return a program's block of columns: pointers and a mask [BLOCK_ROWS, BLOCK_COLUMNS]; and the
    indices of the columns, among the columns of all heads, and a mask [BLOCK_COLUMNS]."""
    blocks_of_piece: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    piece = tl.program_id(1) // blocks_of_piece
    slot = tl.load(tables_ptr + sequence * table_stride + (first + piece) // PER_SLOT).to(tl.int64)
    within = tl.program_id(1) % blocks_of_piece * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    rows = tl.arange(0, BLOCK_ROWS)
    start = slots_ptr + slot * slot_stride + (first + piece) % PER_SLOT * ROWS * COLUMNS
    mask = (rows < ROWS)[:, None] & (within < COLUMNS)[None, :]
    pointers = start + rows[:, None] * COLUMNS + within[None, :]
    return pointers, mask, piece * COLUMNS + within, within < COLUMNS


@triton.jit
def _gated_delta_kernel(
    mixed_ptr,  # [T, queries, keys, values of all heads]
    decay_ptr,  # [T, NUM_HEADS * DECAY_WIDTH]
    beta_ptr,  # [T, NUM_HEADS]
    read_ptr,  # [T, NUM_HEADS * VALUE_WIDTH]
    decay_rate_ptr,  # [NUM_HEADS]
    dt_bias_ptr,  # [NUM_HEADS * DECAY_WIDTH]
    slots_ptr,
    tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    decay_stride,
    beta_stride,
    slot_stride,
    table_stride,
    first,
    max_beta,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    DECAY_WIDTH: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_SLOT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program for each sequence and block of columns of its matrices."""
    num_keys: tl.constexpr = NUM_KEY_HEADS * KEY_WIDTH
    num_values: tl.constexpr = NUM_HEADS * VALUE_WIDTH
    sequence = tl.program_id(0)
    start = tl.load(query_starts_ptr + sequence)
    end = tl.load(query_starts_ptr + sequence + 1)
    if start == end or end - start > MOST_TOKENS:
        return
    block, mask, columns, column_mask = _block_of(
        slots_ptr,
        tables_ptr,
        sequence,
        slot_stride,
        table_stride,
        first,
        KEY_WIDTH,
        COLUMNS,
        PER_SLOT,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
    has_state = tl.load(context_lens_ptr + sequence) > end - start
    matrix = tl.where(has_state, tl.load(block, mask=mask, other=0.0), 0.0)
    head = tl.min(columns, axis=0) // VALUE_WIDTH  # all columns of a piece belong to one head
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    rows = tl.arange(0, BLOCK_ROWS)
    row_mask = rows < KEY_WIDTH
    rate = tl.load(decay_rate_ptr + head)
    # Each row of a head's matrix has its own decay, or all rows have the same decay.
    decay_at = head * DECAY_WIDTH + (rows if DECAY_WIDTH > 1 else rows * 0)
    bias = tl.load(dt_bias_ptr + decay_at, mask=row_mask, other=0.0)
    token = start.to(tl.int64)
    queries = mixed_ptr + token * (2 * num_keys + num_values) + key_head * KEY_WIDTH + rows
    values = mixed_ptr + token * (2 * num_keys + num_values) + 2 * num_keys + columns
    decays = decay_ptr + token * decay_stride + decay_at
    betas = beta_ptr + token * beta_stride + head
    outs = read_ptr + token * num_values + columns
    for _ in range(start, end):
        query = tl.load(queries, mask=row_mask, other=0.0).to(tl.float32)
        key = tl.load(queries + num_keys, mask=row_mask, other=0.0).to(tl.float32)
        query *= scale / tl.sqrt(tl.sum(query * query, axis=0) + 1e-6)
        key /= tl.sqrt(tl.sum(key * key, axis=0) + 1e-6)
        step = softplus(tl.load(decays, mask=row_mask, other=0.0).to(tl.float32) + bias)
        strength = tl.sigmoid(tl.load(betas).to(tl.float32))
        matrix *= tl.exp(-rate * step)[:, None]
        recalled = tl.sum(matrix * key[:, None], axis=0)
        value = tl.load(values, mask=column_mask, other=0.0).to(tl.float32)
        delta = (value - recalled) * (strength * max_beta)
        matrix += key[:, None] * delta[None, :]
        tl.store(outs, tl.sum(matrix * query[:, None], axis=0), mask=column_mask)
        queries += 2 * num_keys + num_values
        values += 2 * num_keys + num_values
        decays += decay_stride
        betas += beta_stride
        outs += num_values
    tl.store(block, matrix, mask=mask)


@triton.jit
def _mamba2_kernel(
    mixed_ptr,  # [T, values of all heads, B and C of all groups]
    dt_ptr,  # [T, NUM_HEADS]
    read_ptr,  # [T, NUM_HEADS * HEAD_WIDTH]
    decay_rate_ptr,  # [NUM_HEADS]
    dt_bias_ptr,  # [NUM_HEADS]
    skip_ptr,  # [NUM_HEADS]
    slots_ptr,
    tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    dt_stride,
    slot_stride,
    table_stride,
    first,
    min_dt,
    max_dt,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_SLOT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program for each sequence and block of columns of its matrices."""
    num_values: tl.constexpr = NUM_HEADS * HEAD_WIDTH
    num_writes: tl.constexpr = NUM_GROUPS * STATE_SIZE
    sequence = tl.program_id(0)
    start = tl.load(query_starts_ptr + sequence)
    end = tl.load(query_starts_ptr + sequence + 1)
    if start == end or end - start > MOST_TOKENS:
        return
    block, mask, columns, column_mask = _block_of(
        slots_ptr,
        tables_ptr,
        sequence,
        slot_stride,
        table_stride,
        first,
        STATE_SIZE,
        COLUMNS,
        PER_SLOT,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
    has_state = tl.load(context_lens_ptr + sequence) > end - start
    matrix = tl.where(has_state, tl.load(block, mask=mask, other=0.0), 0.0)
    head = tl.min(columns, axis=0) // HEAD_WIDTH  # all columns of a piece belong to one head
    group = head // (NUM_HEADS // NUM_GROUPS)
    rows = tl.arange(0, BLOCK_ROWS)
    row_mask = rows < STATE_SIZE
    rate, bias = tl.load(decay_rate_ptr + head), tl.load(dt_bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    token = start.to(tl.int64)
    values = mixed_ptr + token * (num_values + 2 * num_writes) + columns
    writes = (
        mixed_ptr + token * (num_values + 2 * num_writes) + num_values + group * STATE_SIZE + rows
    )
    steps, outs = dt_ptr + token * dt_stride + head, read_ptr + token * num_values + columns
    for _ in range(start, end):
        write = tl.load(writes, mask=row_mask, other=0.0).to(tl.float32)
        read = tl.load(writes + num_writes, mask=row_mask, other=0.0).to(tl.float32)
        value = tl.load(values, mask=column_mask, other=0.0).to(tl.float32)
        step = softplus(tl.load(steps).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, min_dt), max_dt)
        matrix = matrix * tl.exp(-rate * step) + write[:, None] * (value * step)[None, :]
        tl.store(outs, tl.sum(matrix * read[:, None], axis=0) + skip * value, mask=column_mask)
        writes += num_values + 2 * num_writes
        values += num_values + 2 * num_writes
        steps += dt_stride
        outs += num_values
    tl.store(block, matrix, mask=mask)


@triton.jit
def _mamba1_kernel(
    value_ptr,  # [T, NUM_CHANNELS]
    dt_ptr,  # [T, NUM_CHANNELS]
    write_ptr,  # [T, STATE_SIZE]
    read_ptr,  # [T, STATE_SIZE]
    gate_ptr,  # [T, NUM_CHANNELS]
    out_ptr,  # [T, NUM_CHANNELS]
    decay_rate_ptr,  # [STATE_SIZE, NUM_CHANNELS]
    skip_ptr,  # [NUM_CHANNELS]
    slots_ptr,
    tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    value_stride,
    dt_stride,
    write_stride,
    read_stride,
    gate_stride,
    out_stride,
    slot_stride,
    table_stride,
    first,
    NUM_CHANNELS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_SLOT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program for each sequence and block of channels."""
    sequence = tl.program_id(0)
    start = tl.load(query_starts_ptr + sequence)
    end = tl.load(query_starts_ptr + sequence + 1)
    if start == end:
        return
    block, mask, columns, column_mask = _block_of(
        slots_ptr,
        tables_ptr,
        sequence,
        slot_stride,
        table_stride,
        first,
        STATE_SIZE,
        COLUMNS,
        PER_SLOT,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
    has_state = tl.load(context_lens_ptr + sequence) > end - start
    matrix = tl.where(has_state, tl.load(block, mask=mask, other=0.0), 0.0)
    rows = tl.arange(0, BLOCK_ROWS)
    row_mask = rows < STATE_SIZE
    rates = decay_rate_ptr + rows[:, None] * NUM_CHANNELS + columns[None, :]
    rate = tl.load(rates, mask=mask, other=0.0)
    skip = tl.load(skip_ptr + columns, mask=column_mask, other=0.0)
    token = start.to(tl.int64)
    values, steps = value_ptr + token * value_stride, dt_ptr + token * dt_stride
    writes, reads = write_ptr + token * write_stride, read_ptr + token * read_stride
    gates, outs = gate_ptr + token * gate_stride, out_ptr + token * out_stride
    for _ in range(start, end):
        value = tl.load(values + columns, mask=column_mask, other=0.0).to(tl.float32)
        step = tl.load(steps + columns, mask=column_mask, other=0.0).to(tl.float32)
        write = tl.load(writes + rows, mask=row_mask, other=0.0).to(tl.float32)
        read = tl.load(reads + rows, mask=row_mask, other=0.0).to(tl.float32)
        gate = tl.load(gates + columns, mask=column_mask, other=0.0).to(tl.float32)
        step = softplus(step)
        matrix = matrix * tl.exp(-rate * step[None, :]) + write[:, None] * (value * step)[None, :]
        out = tl.sum(matrix * read[:, None], axis=0) + skip * value
        tl.store(outs + columns, out * gate * tl.sigmoid(gate), mask=column_mask)
        values += value_stride
        steps += dt_stride
        writes += write_stride
        reads += read_stride
        gates += gate_stride
        outs += out_stride
    tl.store(block, matrix, mask=mask)
