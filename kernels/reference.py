"""Reference kernels in plain torch: these define what is correct.

Simple before fast: loops over sequences, float64 inside. They run on any device, and read nothing
that the kernels may not read: a stale slot or a table entry past a sequence's blocks stays unread.
"""

import torch

from batchinfer.kernels.fp8 import FP8
from batchinfer.kernels.fp8_blocks import BLOCK, MOST, dequantize_blocks, num_blocks, scales_of


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
    order: torch.Tensor | None = None,  # [S] int32
    shared_lens: torch.Tensor | None = None,  # [S] int32
    max_query_len: int,
    max_context_len: int,
    min_query_len: int = 0,
    num_splits: int | None = None,
    work: object = None,
    launch: int = 0,
    chunks: object = None,
) -> None:
    """Causal attention over a paged KV cache, one sequence after the other.

    The arguments from `order` on decide how the kernel is launched. They change nothing here.
    """
    del order, shared_lens, max_query_len, max_context_len, min_query_len, num_splits, work, launch
    del chunks
    starts = query_starts.tolist()
    for sequence, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        query_len = rows.stop - rows.start
        if query_len == 0:
            continue
        positions = torch.arange(context_len - query_len, context_len, device=query.device)
        begin = max(0, context_len - query_len + 1 - sliding_window) if sliding_window else 0
        key_positions = torch.arange(begin, context_len, device=query.device)
        table = block_tables[sequence]
        mask = visible(positions, key_positions, sliding_window)
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
    """Read the tokens at `positions` of one sequence out of its blocks."""
    block_size = cache.shape[2]
    slots = table[positions // block_size].long()
    return cache[slots, :, positions % block_size]


def visible(
    positions: torch.Tensor,  # [Q]
    key_positions: torch.Tensor,  # [K]
    sliding_window: int,
) -> torch.Tensor:  # [Q, K] bool
    """Positions that each position sees: all up to itself; with a window w those in (p - w, p]."""
    distance = positions[:, None] - key_positions[None, :]
    mask = distance >= 0
    return mask & (distance < sliding_window) if sliding_window else mask


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
    """Masked softmax attention in float64. A sink is one more logit that has no value."""
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
    """Scatter keys and values into their slots; a negative mapping skips the token.

    Transposed float8 values are never NaN: the head's key is, instead.
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
    """Write packed block tables of every group over the beginnings of the tables' rows."""
    count, width = shape.tolist()
    there = packed[: len(tables) * count * width].view(len(tables), count, width)
    tables[:, :count, :width] = there


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in the cache's dtype. float8 e4m3fn saturates; old versions of torch make NaN."""
    if dtype == FP8:
        x = x.clamp(-448.0, 448.0)
    return x.to(dtype)


def block_copy(
    pool: torch.Tensor,  # [num_slots, slot_elems]
    pairs: torch.Tensor,  # [C, 2]
) -> None:
    """Copy the source slot's row of every pair over its destination slot's row."""
    sources, destinations = pairs.long().unbind(dim=1)
    pool[destinations] = pool[sources]


def rms_norm(
    x: torch.Tensor,  # [N, W]
    weight: torch.Tensor,  # [W]
    *,
    eps: float,
    offset: float = 0.0,
    out: torch.Tensor,  # [N, W]
) -> None:
    """x / sqrt(mean(x^2) + eps) * (offset + weight), row by row (Zhang & Sennrich 2019,
    arXiv:1910.07467; an offset of 1 is Gemma's)."""
    wide = x.double()
    inverse = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    out.copy_(wide * inverse * (offset + weight.double()))


def silu_mul(
    gate_up: torch.Tensor,  # [N, 2 * W]
    *,
    out: torch.Tensor,  # [N, W]
) -> None:
    """silu(gate) * up of rows that hold gate and up side by side (Shazeer 2020,
    arXiv:2002.05202)."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    out.copy_(gate * gate.sigmoid() * up)


def rotary_write(
    qkv: torch.Tensor,  # [T, (Hq + 2 * Hkv) * D]
    cos: torch.Tensor,  # [T, R], R <= D
    sin: torch.Tensor,  # [T, R]
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D]
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D]
    slot_mapping: torch.Tensor,  # [T] int64
    *,
    q_norm: torch.Tensor | None = None,  # [D]
    k_norm: torch.Tensor | None = None,  # [D]
    eps: float = 0.0,
    offset: float = 0.0,
) -> None:
    """Queries normalized (where there is a norm) and rotated in place; keys likewise into their
    slots, values as they are. Rotary positions as in GPT-NeoX: element i turns with i + R / 2 (Su
    et al. 2021, arXiv:2104.09864)."""
    _, num_kv_heads, _, width = key_cache.shape
    heads = qkv.view(len(qkv), qkv.shape[1] // width, width)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    value = heads[:, num_heads + num_kv_heads :]

    def turned(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        wide = x.double()
        if norm is not None:
            normed = torch.empty_like(wide)
            rms_norm(wide, norm, eps=eps, offset=offset, out=normed)
            wide = normed
        turning, rest = wide[..., : cos.shape[1]], wide[..., cos.shape[1] :]
        low, high = turning.chunk(2, dim=-1)
        quarter_turn = torch.cat([-high, low], dim=-1)
        turning = turning * cos.double()[:, None] + quarter_turn * sin.double()[:, None]
        return torch.cat([turning, rest], dim=-1)

    kv_write(turned(key, k_norm), value, key_cache, value_cache, slot_mapping)
    query.copy_(turned(query, q_norm))


def row_stats(
    logits: torch.Tensor,  # [R, V]
    *,
    maximum: torch.Tensor,  # [R] float32
    max_logprob: torch.Tensor,  # [R] float32
    argmax: torch.Tensor,  # [R] int64
) -> None:
    """Each row's maximum, where it is first reached, and its log-probability."""
    values = logits.double()
    maximum.copy_(values.amax(1))
    max_logprob.copy_(values.log_softmax(1).amax(1))
    argmax.copy_(values.argmax(1))


def lora_shrink(
    x: torch.Tensor,  # [T, W]
    down: torch.Tensor,  # [A, R, W]
    rows: torch.Tensor,  # [N] int64
    starts: torch.Tensor,  # [any + 1] int32; rows past A's are left alone
    *,
    lowered: torch.Tensor,  # [P, N, R] float32
) -> None:
    """Write each row's product with its adapter's first factor, whole in the first piece."""
    for factor, start, stop in zip(down, starts[:-1].tolist(), starts[1:].tolist(), strict=False):
        lowered[:, start:stop] = 0
        lowered[0, start:stop] = (x[rows[start:stop]].double() @ factor.double().T).float()


def lora_expand(
    lowered: torch.Tensor,  # [P, N, R] float32
    up: torch.Tensor,  # [A, M, R]
    rows: torch.Tensor,  # [N] int64
    starts: torch.Tensor,  # [any + 1] int32; rows past A's are left alone
    *,
    out: torch.Tensor,  # [T, M]
) -> None:
    """Add each row's product with its adapter's second factor."""
    whole = lowered.sum(0).to(up.dtype)
    for factor, start, stop in zip(up, starts[:-1].tolist(), starts[1:].tolist(), strict=False):
        product = whole[start:stop].double() @ factor.double().T
        out[rows[start:stop]] = (out[rows[start:stop]].double() + product).to(out.dtype)


def matmul(
    x: torch.Tensor,  # [M, K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
    *,
    out: torch.Tensor,  # [M, N]
    adds: bool = False,
) -> None:
    """Write every row's product with the weight into `out`, or add it to what that holds."""
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
    """Write rows as float8 and the scales of their groups of 128 columns, group after group."""
    for group in range(num_blocks(x.shape[1])):
        columns = slice(group * BLOCK, (group + 1) * BLOCK)
        numbers = x[:, columns].float()
        scales[group], up = scales_of(numbers.abs().amax(1))
        codes[:, columns] = (numbers * up[:, None]).clamp(-MOST, MOST).to(FP8)


def fp8_linear(
    x: torch.Tensor,  # [T, K]; float8 with scales
    weight: torch.Tensor,  # [N, K] float8
    weight_scales: torch.Tensor,  # [ceil(N / 128), G] float32
    *,
    out: torch.Tensor,  # [T, N]
    x_scales: torch.Tensor | None = None,  # [G, T] float32
    bias: torch.Tensor | None = None,  # [N]
    adds: bool = False,
    pieces: int | None = None,
) -> None:
    """Write, or add, rows times a weight's transpose, of the numbers that both stand for."""
    del pieces  # decides how the kernel is launched
    rows = x.double()
    if x_scales is not None:
        rows = rows * x_scales.T.double().repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    product = rows @ dequantize_blocks(weight, weight_scales, torch.float64).T
    if bias is not None:
        product += bias.double()
    out.copy_(out.double() + product if adds else product)
