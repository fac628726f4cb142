"""Reference implementations of the kernels in plain torch, which define the correct results.

The references are simple instead of fast: they loop over sequences and compute in float64, on any
device. Like the kernels, they never read stale slots or table entries after a sequence's last
block.
"""

import torch

from batchinfer.kernels.fp8 import FP8
from batchinfer.kernels.fp8_blocks import BLOCK, MOST, dequantize_blocks, num_blocks, scales_of
from batchinfer.kernels.int4_words import Int4Words
from batchinfer.kernels.rotary_pairs import PER_ELEMENT, RotaryPairs


def paged_attention(
    query: torch.Tensor,  # [T, Hq, Dk]
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dk]
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dv]
    block_tables: torch.Tensor,  # [S, max_blocks] int32
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32
    *,
    scale: float,
    out: torch.Tensor,  # [T, Hq, Dv]
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [Hq]
    query_ends: torch.Tensor | None = None,  # [T] int32
    prompt_lens: torch.Tensor | None = None,  # [S] int32
) -> None:
    """Compute causal attention over a paged KV cache, one sequence after the other.

    Args:
        query_ends: one past the last position that each query token sees. An end is larger than the
            token's own position, at most the sequence's context length, and never smaller than the
            previous token's end. None: attention is causal.
        prompt_lens: number of leading positions of each sequence that the window does not hide.
    """
    starts = query_starts.tolist()
    for sequence, context_len in enumerate(context_lens.tolist()):
        prompt_len = 0 if prompt_lens is None else int(prompt_lens[sequence])
        rows = slice(starts[sequence], starts[sequence + 1])
        query_len = rows.stop - rows.start
        if query_len == 0:
            continue
        positions = torch.arange(context_len - query_len, context_len, device=query.device)
        begin = max(0, context_len - query_len + 1 - sliding_window) if sliding_window else 0
        begin = 0 if prompt_len else begin
        key_positions = torch.arange(begin, context_len, device=query.device)
        table = block_tables[sequence]
        ends = None if query_ends is None else query_ends[rows]
        mask = visible(positions, key_positions, sliding_window, ends, prompt_len)
        out[rows] = attention(
            query[rows],
            gather(key_cache, table, key_positions),
            gather(value_cache, table, key_positions),
            mask,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        ).to(out.dtype)


def gather(
    cache: torch.Tensor,  # [num_slots, Hkv, block_size, D]
    table: torch.Tensor,  # [max_blocks]
    positions: torch.Tensor,  # [K]
) -> torch.Tensor:  # [K, Hkv, D]
    block_size = cache.shape[2]
    slots = table[positions // block_size].long()
    return cache[slots, :, positions % block_size]


def visible(
    positions: torch.Tensor,  # [Q]
    key_positions: torch.Tensor,  # [K]
    sliding_window: int,
    ends: torch.Tensor | None = None,  # [Q]
    prompt_len: int = 0,
) -> torch.Tensor:  # [Q, K] bool
    """Return the mask of causal attention: position p sees [0, p], or (p - w, p] with a window w.
    With ``ends``, position p sees all positions before its own end. The window does not hide the
    first ``prompt_len`` positions."""
    distance = positions[:, None] - key_positions[None, :]
    mask = distance >= 0 if ends is None else key_positions[None, :] < ends[:, None]
    if sliding_window:
        mask &= (distance < sliding_window) | (key_positions < prompt_len)
    return mask


def attention(
    query: torch.Tensor,  # [Q, Hq, Dk]
    key: torch.Tensor,  # [K, Hkv, Dk]
    value: torch.Tensor,  # [K, Hkv, Dv]
    mask: torch.Tensor,  # [Q, K] bool
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,  # [Hq]
) -> torch.Tensor:  # [Q, Hq, Dv] float64
    """Compute masked softmax attention in float64. A sink is an additional logit without a
    value."""
    group = query.shape[1] // key.shape[1]
    key = key.double().repeat_interleave(group, dim=1)
    value = value.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def kv_write(
    key: torch.Tensor,  # [T, Hkv, Dk]
    value: torch.Tensor,  # [T, Hkv, Dv]
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dk]
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dv]
    slot_mapping: torch.Tensor,  # [T] int64
) -> None:
    """Scatter keys and values into their slots; skip tokens with a negative mapping.

    A NaN among transposed float8 values becomes 0, and makes the head's key NaN instead.
    """
    block_size = key_cache.shape[2]
    kept = slot_mapping >= 0
    slots, offsets = slot_mapping[kept] // block_size, slot_mapping[kept] % block_size
    key, value = key[kept], value[kept]
    if value_cache.dtype == FP8 and value_cache.stride(3) != 1:
        lost = value.isnan()
        key = key.masked_fill(lost.any(2, keepdim=True), torch.nan)
        value = value.masked_fill(lost, 0)
    key_cache[slots, :, offsets] = stored(key, key_cache.dtype)
    value_cache[slots, :, offsets] = stored(value, value_cache.dtype)


def unpack_block_tables(
    packed: torch.Tensor,  # [N] int32
    shape: torch.Tensor,  # [2] int32
    tables: torch.Tensor,  # [G, S, max_blocks] int32
) -> None:
    """Copy each row of every group's packed block tables to the start of the same row of
    ``tables``."""
    count, width = shape.tolist()
    blocks = packed[: len(tables) * count * width].view(len(tables), count, width)
    tables[:, :count, :width] = blocks


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert values to the cache's dtype. float8 values are clamped, because old versions of torch
    do not saturate."""
    if dtype == FP8:
        x = x.clamp(-448.0, 448.0)
    return x.to(dtype)


def block_copy(
    pool: torch.Tensor,  # [num_slots, slot_elems]
    pairs: torch.Tensor,  # [C, 2]
) -> None:
    sources, destinations = pairs.long().unbind(dim=1)
    pool[destinations] = pool[sources]


def rms_norm(
    x: torch.Tensor,  # [N, W]
    weight: torch.Tensor,  # [W]
    *,
    eps: float,
    offset: float = 0.0,
    centered: bool = False,
    out: torch.Tensor,  # [N, W]
) -> None:
    """Write x / sqrt(mean(x^2) + eps) * (offset + weight) to `out`. Gemma models have an offset of
    1."""
    wide = x.double()
    if centered:
        wide = wide - wide.mean(dim=-1, keepdim=True)
    inverse = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    out.copy_(wide * inverse * (offset + weight.double()))


def silu_mul(
    gate_up: torch.Tensor,  # [N, 2 * W]
    *,
    out: torch.Tensor,  # [N, W]
) -> None:
    """Write silu(gate) * up to `out`. A row's first half is the gate, and its second half is up."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    out.copy_(gate * gate.sigmoid() * up)


def sigmoid_mul(
    x: torch.Tensor,  # [T, H, D]
    gate: torch.Tensor,  # [T, H, D]
) -> None:
    x.copy_(x.double() * gate.double().sigmoid())


def rotary_write(
    qkv: torch.Tensor,  # [T, Hq * S + 2 * Hkv * D]
    cos: torch.Tensor,  # [T, R], R <= D
    sin: torch.Tensor,  # [T, R]
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D]
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D]
    slot_mapping: torch.Tensor,  # [T] int64
    *,
    q_norm: torch.Tensor | None = None,  # [D], or [Hq * D] to normalize all heads together
    k_norm: torch.Tensor | None = None,  # [D], or [Hkv * D]
    eps: float = 0.0,
    offset: float = 0.0,
    query_head_stride: int = 0,
    pairs: RotaryPairs = PER_ELEMENT,
) -> None:
    """Normalize (if norms are passed) and rotate queries in place. Write normalized, rotated keys
    and unchanged values to their slots. As in GPT-NeoX, elements i and i + R / 2 are rotated
    together.

    Args:
        query_head_stride: distance S between query heads in elements; 0: D.
    """
    _, num_kv_heads, _, width = key_cache.shape
    kv_width = num_kv_heads * width
    query, key, value = qkv.split_with_sizes(
        [qkv.shape[1] - 2 * kv_width, kv_width, kv_width], dim=1
    )
    stride = query_head_stride or width
    query = query.view(len(qkv), query.shape[1] // stride, stride)[..., :width]
    key, value = (part.view(len(qkv), num_kv_heads, width) for part in (key, value))

    rotary_width = cos.shape[1] * (2 if pairs.halves else 1)
    angles = torch.arange(rotary_width, device=qkv.device)
    if pairs.by_pair:
        angles = angles // 2 if pairs.adjacent else angles % (rotary_width // 2)
    cosines, sines = cos.double()[:, angles], sin.double()[:, angles]

    def turned(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        wide = x.double()
        if norm is not None:
            rows = wide if len(norm) == width else wide.flatten(1)
            normed = torch.empty_like(rows)
            rms_norm(rows, norm, eps=eps, offset=offset, out=normed)
            wide = normed.view(x.shape)
        turning, unrotated = wide[..., :rotary_width], wide[..., rotary_width:]
        if pairs.adjacent:
            low, high = turning[..., ::2], turning[..., 1::2]
            quarter_turn = torch.stack([-high, low], dim=-1).flatten(-2)
        else:
            low, high = turning.chunk(2, dim=-1)
            quarter_turn = torch.cat([-high, low], dim=-1)
        turning = turning * cosines[:, None] + quarter_turn * sines[:, None]
        return torch.cat([turning, unrotated], dim=-1)

    kv_write(turned(key, k_norm), value, key_cache, value_cache, slot_mapping)
    query.copy_(turned(query, q_norm))


def row_stats(
    logits: torch.Tensor,  # [R, V]
    *,
    maximum: torch.Tensor,  # [R] float32
    max_logprob: torch.Tensor,  # [R] float32
    argmax: torch.Tensor,  # [R] int64
) -> None:
    """Write each row's maximum, the first index of the maximum, and its log-probability."""
    values = logits.double()
    maximum.copy_(values.amax(1))
    max_logprob.copy_(values.log_softmax(1).amax(1))
    argmax.copy_(values.argmax(1))


def lora_shrink(
    x: torch.Tensor,  # [T, W]
    down: torch.Tensor,  # [A, R, W]
    rows: torch.Tensor,  # [N] int64
    starts: torch.Tensor,  # [B + 1] int32; adapters from A on are skipped
    *,
    lowered: torch.Tensor,  # [P, N, R] float32
) -> None:
    """Multiply each row by its adapter's first factor. Write the product to the first piece of
    `lowered`, and zeros to the other pieces."""
    for factor, start, stop in zip(down, starts[:-1].tolist(), starts[1:].tolist(), strict=False):
        lowered[:, start:stop] = 0
        lowered[0, start:stop] = (x[rows[start:stop]].double() @ factor.double().T).float()


def lora_expand(
    lowered: torch.Tensor,  # [P, N, R] float32
    up: torch.Tensor,  # [A, M, R]
    rows: torch.Tensor,  # [N] int64
    starts: torch.Tensor,  # [B + 1] int32; adapters from A on are skipped
    *,
    out: torch.Tensor,  # [T, M]
) -> None:
    """Add up the pieces of `lowered`, multiply each row by its adapter's second factor, and add the
    product to `out`."""
    summed = lowered.sum(0).to(up.dtype)
    for factor, start, stop in zip(up, starts[:-1].tolist(), starts[1:].tolist(), strict=False):
        product = summed[start:stop].double() @ factor.double().T
        out[rows[start:stop]] = (out[rows[start:stop]].double() + product).to(out.dtype)


def matmul(
    x: torch.Tensor,  # [M, K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
    *,
    out: torch.Tensor,  # [M, N]
    adds: bool = False,
) -> None:
    """Multiply every row by the weight, and write the product to `out`, or add it to `out`."""
    product = x.double() @ weight.double().T
    if bias is not None:
        product += bias.double()
    out.copy_(product + out.double() if adds else product)


def quantize_groups(
    x: torch.Tensor,  # [T, K] any float
    *,
    codes: torch.Tensor,  # [T, K] float8
    scales: torch.Tensor,  # [G, T] float32
) -> None:
    for group in range(num_blocks(x.shape[1])):
        columns = slice(group * BLOCK, (group + 1) * BLOCK)
        numbers = x[:, columns].float()
        scales[group], up = scales_of(numbers.abs().amax(1))
        codes[:, columns] = (numbers * up[:, None]).clamp(-MOST, MOST).to(FP8)


def fp8_linear(
    x: torch.Tensor,  # [T, K]; float8 if x_scales is given
    weight: torch.Tensor,  # [N, K] float8
    weight_scales: torch.Tensor,  # [ceil(N / 128), G] float32
    *,
    out: torch.Tensor,  # [T, N]
    x_scales: torch.Tensor | None = None,  # [G, T] float32
    bias: torch.Tensor | None = None,  # [N]
    adds: bool = False,
    pieces: int | None = None,
) -> None:
    """Write the product of the dequantized x and weight to `out`, or add it to `out`."""
    del pieces  # affects only the kernel's launch
    rows = x.double()
    if x_scales is not None:
        rows = rows * x_scales.T.double().repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    product = rows @ dequantize_blocks(weight, weight_scales, torch.float64).T
    if bias is not None:
        product += bias.double()
    out.copy_(out.double() + product if adds else product)


def int4_linear(
    x: torch.Tensor,  # [T, K]
    weight: Int4Words,  # [N, K]
    *,
    out: torch.Tensor,  # [T, N]
    bias: torch.Tensor | None = None,  # [N]
    adds: bool = False,
    pieces: int | None = None,
    batch_invariant: bool = False,
) -> None:
    """Write the product of x and the dequantized weight to `out`, or add it to `out`."""
    del pieces, batch_invariant  # affect only the kernel's launch
    product = x.double() @ weight.dequantized(torch.float64).T
    if bias is not None:
        product += bias.double()
    out.copy_(out.double() + product if adds else product)
