"""Applies head norms and rotary embeddings to q/k/v, and writes the KV cache, in one launch.

Formula, for every token and every query and key head x (Su et al. 2021, arXiv:2104.09864, with the
layout of GPT-NeoX), where R is the rotary width. If there is a norm, x is first normalized as in
`rms_norm`:

    out[i]         = x[i]         * cos[i]         - x[i + R / 2] * sin[i]          i < R / 2
    out[i + R / 2] = x[i + R / 2] * cos[i + R / 2] + x[i]         * sin[i + R / 2]
    out[i]         = x[i]                                                           i >= R

Some families rotate adjacent elements 2i and 2i + 1 instead of i and i + R / 2, and the cosines
and sines of some have a column for each pair (`RotaryPairs`).

Queries are changed in place; keys and values are written to their slots. Results are computed in
float32 and rounded once (float8: see `fp8.py`). One program computes all heads of one token.
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.fp8 import as_bytes, is_transposed, narrow, without_nan
from batchinfer.kernels.launch import OPTIONS, check_launchable, warps_for
from batchinfer.kernels.rotary_pairs import PER_ELEMENT, RotaryPairs


def rotary_write(
    qkv: torch.Tensor,  # [T, Hq * S + 2 * Hkv * D], last dimension contiguous
    cos: torch.Tensor,  # [T, R], contiguous
    sin: torch.Tensor,  # [T, R], contiguous
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D], last dimension contiguous
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D], any strides
    slot_mapping: torch.Tensor,  # [T] int64, slot * block_size + offset; negative: skip the token
    *,
    q_norm: torch.Tensor | None = None,  # [D], or [Hq * D] to normalize all heads together
    k_norm: torch.Tensor | None = None,  # [D], or [Hkv * D]
    eps: float = 0.0,
    offset: float = 0.0,
    query_head_stride: int = 0,
    pairs: RotaryPairs = PER_ELEMENT,
) -> None:
    """Normalize and rotate queries in place. Write normalized, rotated keys and unchanged values to
    the cache.

    Args:
        query_head_stride: distance S between query heads in elements; 0: D.
        pairs: which elements are rotated together. With `halves`, R is twice the width of `cos`.
    """
    check_launchable("rotary_write", qkv, cos, sin, key_cache, value_cache, slot_mapping)
    _, num_kv_heads, block_size, width = key_cache.shape
    query_head_stride = query_head_stride or width
    num_heads = (qkv.shape[1] - 2 * num_kv_heads * width) // query_head_stride
    if len(qkv) == 0:
        return
    heads_block = triton.next_power_of_2(num_heads + num_kv_heads)
    width_block = triton.next_power_of_2(width)
    _rotary_write_kernel[(len(qkv),)](
        qkv,
        cos,
        sin,
        as_bytes(key_cache),
        as_bytes(value_cache),
        slot_mapping,
        q_norm,
        k_norm,
        qkv.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride(),
        eps,
        OFFSET=offset,
        NORMS_ROWS=q_norm is not None and len(q_norm) != width,
        NUM_HEADS=num_heads,
        QUERY_HEAD_STRIDE=query_head_stride,
        NUM_KV_HEADS=num_kv_heads,
        WIDTH=width,
        ROTARY_WIDTH=cos.shape[1] * (2 if pairs.halves else 1),
        ANGLES=cos.shape[1],
        ADJACENT=pairs.adjacent,
        BY_PAIR=pairs.by_pair,
        BLOCK_SIZE=block_size,
        TRANSPOSED=is_transposed(value_cache),
        HEADS_BLOCK=heads_block,
        KV_HEADS_BLOCK=triton.next_power_of_2(num_kv_heads),
        WIDTH_BLOCK=width_block,
        num_warps=warps_for(heads_block * width_block),
        **OPTIONS,
    )


@triton.jit(do_not_specialize=["eps"])
def _rotary_write_kernel(
    qkv_ptr,  # [T, Hq * S + 2 * Hkv * D]
    cos_ptr,  # [T, R]
    sin_ptr,  # [T, R]
    key_cache_ptr,  # [num_slots, Hkv, block_size, D]
    value_cache_ptr,  # [num_slots, Hkv, block_size, D]
    slot_mapping_ptr,  # [T] int64
    q_norm_ptr,  # [D] or None
    k_norm_ptr,  # [D] or None
    qkv_token_stride,
    key_cache_slot_stride,
    key_cache_head_stride,
    key_cache_token_stride,
    value_cache_slot_stride,
    value_cache_head_stride,
    value_cache_token_stride,
    value_cache_width_stride,
    eps,
    OFFSET: tl.constexpr,
    NORMS_ROWS: tl.constexpr,  # norms span all heads
    NUM_HEADS: tl.constexpr,
    QUERY_HEAD_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr,
    ANGLES: tl.constexpr,  # columns of cos and sin
    ADJACENT: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_HEADS_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    qkv_ptr += token * qkv_token_stride
    destination = tl.load(slot_mapping_ptr + token).to(tl.int64)
    slot = destination // BLOCK_SIZE
    position = destination % BLOCK_SIZE
    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    columns = tl.arange(0, WIDTH_BLOCK)[None, :]
    is_query = heads < NUM_HEADS
    mask = (heads < NUM_HEADS + NUM_KV_HEADS) & (columns < WIDTH)

    # Each element is rotated together with its partner. Beyond the rotary width, cos is 1 and sin
    # is 0.
    half: tl.constexpr = ROTARY_WIDTH // 2
    turns = columns < ROTARY_WIDTH
    if ADJACENT:
        is_low = columns % 2 == 0
        partner = tl.where(turns, columns ^ 1, columns)
        pair = columns // 2
    else:
        is_low = columns < half
        partner = tl.where(is_low, columns + half, tl.where(turns, columns - half, columns))
        pair = columns % half
    angle = columns
    if BY_PAIR:
        angle = pair
    cos = tl.load(cos_ptr + token * ANGLES + angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * ANGLES + angle, mask=turns, other=0.0).to(tl.float32)

    first_key: tl.constexpr = NUM_HEADS * QUERY_HEAD_STRIDE
    starts = tl.where(is_query, heads * QUERY_HEAD_STRIDE, first_key + (heads - NUM_HEADS) * WIDTH)
    x = tl.load(qkv_ptr + starts + columns, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(qkv_ptr + starts + partner, mask=mask, other=0.0).to(tl.float32)
    if q_norm_ptr is not None:
        if NORMS_ROWS:
            square = tl.where(mask, x * x, 0.0)
            queries = tl.sum(tl.where(is_query, square, 0.0)) / (NUM_HEADS * WIDTH)
            keys = tl.sum(tl.where(is_query, 0.0, square)) / (NUM_KV_HEADS * WIDTH)
            inverse = 1.0 / tl.sqrt(tl.where(is_query, queries, keys) + eps)
            q_norm_ptr += heads * WIDTH
            k_norm_ptr += (heads - NUM_HEADS) * WIDTH
        else:
            inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1)[:, None] / WIDTH + eps)
        here = columns < WIDTH
        of_query, of_key = here, here
        if NORMS_ROWS:
            of_query, of_key = mask & is_query, mask & (heads >= NUM_HEADS)
        q_norm = tl.load(q_norm_ptr + columns, mask=of_query, other=0.0).to(tl.float32)
        k_norm = tl.load(k_norm_ptr + columns, mask=of_key, other=0.0).to(tl.float32)
        x *= inverse * (OFFSET + tl.where(is_query, q_norm, k_norm))
        q_norm = tl.load(q_norm_ptr + partner, mask=of_query, other=0.0).to(tl.float32)
        k_norm = tl.load(k_norm_ptr + partner, mask=of_key, other=0.0).to(tl.float32)
        y *= inverse * (OFFSET + tl.where(is_query, q_norm, k_norm))
    turned = x * cos + tl.where(is_low, -y, y) * sin

    # All elements must be read before the first is written. A barrier within the program is enough,
    # because other programs do not access this token's elements.
    tl.debug_barrier()
    tl.store(qkv_ptr + starts + columns, turned, mask=mask & is_query)
    if destination < 0:
        return
    if TRANSPOSED:
        # In a row of qkv, a key's value comes NUM_KV_HEADS heads after the key.
        is_key = mask & (heads >= NUM_HEADS)
        values = qkv_ptr + starts + NUM_KV_HEADS * WIDTH + columns
        turned, _ = without_nan(turned, tl.load(values, mask=is_key, other=0.0))
    key_cache_ptr += slot * key_cache_slot_stride + position * key_cache_token_stride
    tl.store(
        key_cache_ptr + (heads - NUM_HEADS).to(tl.int64) * key_cache_head_stride + columns,
        narrow(turned, key_cache_ptr.dtype.element_ty),
        mask=mask & (heads >= NUM_HEADS),
    )
    kv_heads = tl.arange(0, KV_HEADS_BLOCK)[:, None]
    mask = (kv_heads < NUM_KV_HEADS) & (columns < WIDTH)
    first_value = first_key + NUM_KV_HEADS * WIDTH
    value = tl.load(qkv_ptr + first_value + kv_heads * WIDTH + columns, mask=mask, other=0.0)
    if TRANSPOSED:
        value = tl.where(value == value, value, 0.0)
    value_cache_ptr += slot * value_cache_slot_stride + position * value_cache_token_stride
    tl.store(
        value_cache_ptr
        + kv_heads.to(tl.int64) * value_cache_head_stride
        + columns * value_cache_width_stride,
        narrow(value, value_cache_ptr.dtype.element_ty),
        mask=mask,
    )
