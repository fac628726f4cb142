"""The causal convolution of a recurrent layer, over packed sequences, with its state in pool slots.

Formula, for each channel, with the inputs x of a sequence and zeros before its first token:

    out[t] = activation(bias + sum over i of weight[i] * x[t - conv_width + 1 + i])

computed in float32. A sequence's state is its last `conv_width - 1` inputs.
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.causal_conv import CausalConvWeights
from batchinfer.kernels.launch import OPTIONS, check_launchable
from batchinfer.kernels.recurrent_state import PagedStates

_BLOCK = 256  # channels per program


def recurrent_conv(
    inputs: torch.Tensor,  # [T, C], last dimension contiguous
    weight: torch.Tensor,  # [conv_width, C] float32
    bias: torch.Tensor | None,  # [C] float32
    *,
    states: PagedStates,
    silu: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the convolution [T, C] of packed sequences, and update their states.

    The rows of padding tokens are undefined.

    Args:
        silu: true to apply SiLU to the result.
        dtype: dtype of the result.
    """
    num_tokens, num_channels = inputs.shape
    conv_width, num_sequences = len(weight), len(states.context_lens)
    out = torch.empty(num_tokens, num_channels, dtype=dtype, device=inputs.device)
    check_launchable("recurrent_conv", inputs, weight, bias, states.slots, states.tables, out)
    if num_tokens == 0:
        return out
    places, blocks = states.places, triton.cdiv(num_channels, _BLOCK)
    pointers = states.slots, states.tables, states.query_starts, states.context_lens
    strides = inputs.stride(0), states.slots.stride(0), states.tables.stride(0)
    constants = {
        "NUM_CHANNELS": num_channels,
        "CONV_WIDTH": conv_width,
        "CHANNELS": places.channels,
        "PER_SLOT": places.conv_per_slot,
        "FIRST_SLOT": places.conv_slot,
        "BLOCK": _BLOCK,
        **OPTIONS,
    }
    _conv_kernel[(num_tokens, blocks)](
        *(inputs, weight, bias, out, *pointers, num_sequences, *strides, places.conv_first),
        LOG_SEQUENCES=num_sequences.bit_length(),
        HAS_BIAS=bias is not None,
        SILU=silu,
        **constants,
    )
    _update_kernel[(num_sequences, blocks)](
        *(inputs, *pointers, *strides, places.conv_first), **constants
    )
    return out


def causal_conv(
    inputs: torch.Tensor,  # [T, C]
    before: torch.Tensor | None = None,  # [T, C]; multiplies the inputs
    after: torch.Tensor | None = None,  # [T, C]; multiplies the outputs
    *,
    weights: CausalConvWeights,
    states: PagedStates,
    out: torch.Tensor,  # [T, C]
) -> None:
    """Convolve packed sequences, and update their states. The reference is `causal_conv.py`.
    Products of `inputs` and `before` are rounded to the inputs' dtype."""
    x = inputs if before is None else inputs * before
    y = recurrent_conv(x, weights.conv, weights.bias, states=states, silu=weights.silu)
    out.copy_(y if after is None else y * after)


@triton.jit
def _state_of(
    slots_ptr,
    tables_ptr,
    sequence,
    channels,  # [BLOCK]
    mask,
    slot_stride,
    table_stride,
    first,
    CONV_WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PER_SLOT: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
):
    """Return pointers [BLOCK] to the oldest input of each channel in a sequence's state."""
    piece = first + channels // CHANNELS
    slots = tables_ptr + sequence * table_stride + FIRST_SLOT + piece // PER_SLOT
    slot = tl.load(slots, mask=mask, other=0).to(tl.int64)
    within = piece % PER_SLOT * (CONV_WIDTH - 1) * CHANNELS + channels % CHANNELS
    return slots_ptr + slot * slot_stride + within


@triton.jit
def _conv_kernel(
    input_ptr,  # [T, NUM_CHANNELS]
    weight_ptr,  # [CONV_WIDTH, NUM_CHANNELS]
    bias_ptr,  # [NUM_CHANNELS]
    out_ptr,  # [T, NUM_CHANNELS]
    slots_ptr,
    tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    num_sequences,
    input_stride,
    slot_stride,
    table_stride,
    first,
    LOG_SEQUENCES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    CONV_WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PER_SLOT: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token and block of channels."""
    token = tl.program_id(0)
    if token >= tl.load(query_starts_ptr + num_sequences):
        return
    sequence, beyond = 0, num_sequences  # binary search for the token's sequence
    for _ in range(LOG_SEQUENCES):
        middle = (sequence + beyond) // 2
        is_before = tl.load(query_starts_ptr + middle) <= token
        sequence = tl.where(is_before, middle, sequence)
        beyond = tl.where(is_before, beyond, middle)
    start = tl.load(query_starts_ptr + sequence)
    count = tl.load(query_starts_ptr + sequence + 1) - start
    is_new = tl.load(context_lens_ptr + sequence) == count
    oldest = tl.where(is_new, start, start - CONV_WIDTH)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < NUM_CHANNELS
    state = _state_of(
        slots_ptr,
        tables_ptr,
        sequence,
        channels,
        mask,
        slot_stride,
        table_stride,
        first,
        CONV_WIDTH,
        CHANNELS,
        PER_SLOT,
        FIRST_SLOT,
    )
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channels, mask=mask, other=0.0)
    for tap in tl.static_range(CONV_WIDTH):
        at = token - (CONV_WIDTH - 1) + tap
        x = tl.zeros([BLOCK], tl.float32)
        if at >= start:
            new = input_ptr + at.to(tl.int64) * input_stride + channels
            x = tl.load(new, mask=mask, other=0.0).to(tl.float32)
        elif at >= oldest:
            x = tl.load(state + (at - start + CONV_WIDTH - 1) * CHANNELS, mask=mask, other=0.0)
        total += x * tl.load(weight_ptr + tap * NUM_CHANNELS + channels, mask=mask, other=0.0)
    if SILU:
        total *= tl.sigmoid(total)
    tl.store(out_ptr + token.to(tl.int64) * NUM_CHANNELS + channels, total, mask=mask)


@triton.jit
def _update_kernel(
    input_ptr,  # [T, NUM_CHANNELS]
    slots_ptr,
    tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    input_stride,
    slot_stride,
    table_stride,
    first,
    NUM_CHANNELS: tl.constexpr,
    CONV_WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PER_SLOT: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each sequence and block of channels."""
    sequence = tl.program_id(0)
    start = tl.load(query_starts_ptr + sequence)
    end = tl.load(query_starts_ptr + sequence + 1)
    if start == end:
        return
    is_new = tl.load(context_lens_ptr + sequence) == end - start
    oldest = tl.where(is_new, start, start - CONV_WIDTH)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < NUM_CHANNELS
    state = _state_of(
        slots_ptr,
        tables_ptr,
        sequence,
        channels,
        mask,
        slot_stride,
        table_stride,
        first,
        CONV_WIDTH,
        CHANNELS,
        PER_SLOT,
        FIRST_SLOT,
    )
    for row in tl.static_range(CONV_WIDTH - 1):
        at = end - (CONV_WIDTH - 1) + row
        x = tl.zeros([BLOCK], tl.float32)
        if at >= start:
            new = input_ptr + at.to(tl.int64) * input_stride + channels
            x = tl.load(new, mask=mask, other=0.0).to(tl.float32)
        elif at >= oldest:  # moves an old input to an earlier row, which is no longer needed
            x = tl.load(state + (at - start + CONV_WIDTH - 1) * CHANNELS, mask=mask, other=0.0)
        tl.store(state + row * CHANNELS, x, mask=mask)
