"""Writes the keys and values of a step's tokens into their slots of the KV pool.

Formula, for every token t with slot_mapping[t] >= 0, and slot, offset = divmod(slot_mapping[t],
block_size):

    key_cache[slot, h, offset, :]   = key[t, h, :]
    value_cache[slot, h, offset, :] = value[t, h, :]

Layout: see `README.md`. Keys and values are converted to the cache's dtype (float8: see `fp8.py`).
Source: the block-wise KV cache of PagedAttention (Kwon et al. 2023, arXiv:2309.06180).
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.fp8 import as_bytes, is_transposed, narrow, without_nan
from batchinfer.kernels.launch import OPTIONS, check_launchable

# Number of key elements, and of value elements, that one program writes: 16 for each of 128
# threads.
_TILE_ELEMENTS = 2048


def kv_write(
    key: torch.Tensor,  # [T, Hkv, Dk]
    value: torch.Tensor,  # [T, Hkv, Dv]
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dk], any strides
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dv], any strides
    slot_mapping: torch.Tensor,  # [T] int64, slot * block_size + offset; negative: skip the token
) -> None:
    """Scatter `key` and `value` into the caches. Destinations must be distinct."""
    check_launchable("kv_write", key, value, key_cache, value_cache, slot_mapping)
    num_tokens, num_heads, key_width = key.shape
    value_width = value.shape[2]
    if num_tokens == 0:
        return
    width_block = triton.next_power_of_2(max(key_width, value_width))
    head_block = min(triton.next_power_of_2(num_heads), max(1, _TILE_ELEMENTS // width_block))
    _kv_write_kernel[(num_tokens, triton.cdiv(num_heads, head_block))](
        key,
        value,
        as_bytes(key_cache),
        as_bytes(value_cache),
        slot_mapping,
        *key.stride(),
        *value.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        NUM_HEADS=num_heads,
        BLOCK_SIZE=key_cache.shape[2],
        KEY_WIDTH=key_width,
        VALUE_WIDTH=value_width,
        TRANSPOSED=is_transposed(value_cache),
        HEAD_BLOCK=head_block,
        WIDTH_BLOCK=width_block,
        **OPTIONS,
    )


@triton.jit
def _kv_write_kernel(
    key_ptr,  # [T, Hkv, Dk]
    value_ptr,  # [T, Hkv, Dv]
    key_cache_ptr,  # [num_slots, Hkv, block_size, Dk]
    value_cache_ptr,  # [num_slots, Hkv, block_size, Dv]
    slot_mapping_ptr,  # [T] int64
    key_token_stride,
    key_head_stride,
    key_width_stride,
    value_token_stride,
    value_head_stride,
    value_width_stride,
    key_cache_slot_stride,
    key_cache_head_stride,
    key_cache_token_stride,
    key_cache_width_stride,
    value_cache_slot_stride,
    value_cache_head_stride,
    value_cache_token_stride,
    value_cache_width_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    destination = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if destination < 0:
        return
    slot = destination // BLOCK_SIZE
    offset = destination % BLOCK_SIZE
    heads = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)).to(tl.int64)[:, None]
    columns = tl.arange(0, WIDTH_BLOCK)[None, :]

    key_mask = (heads < NUM_HEADS) & (columns < KEY_WIDTH)
    key_ptr += token * key_token_stride
    key = tl.load(key_ptr + heads * key_head_stride + columns * key_width_stride, mask=key_mask)
    value_mask = (heads < NUM_HEADS) & (columns < VALUE_WIDTH)
    value_ptr += token * value_token_stride
    value_ptrs = value_ptr + heads * value_head_stride + columns * value_width_stride
    if TRANSPOSED:
        value = tl.load(value_ptrs, mask=value_mask, other=0.0)
        key, value = without_nan(key, value)
    else:
        value = tl.load(value_ptrs, mask=value_mask)

    key_cache_ptr += slot * key_cache_slot_stride + offset * key_cache_token_stride
    tl.store(
        key_cache_ptr + heads * key_cache_head_stride + columns * key_cache_width_stride,
        narrow(key, key_cache_ptr.dtype.element_ty),
        mask=key_mask,
    )
    value_cache_ptr += slot * value_cache_slot_stride + offset * value_cache_token_stride
    tl.store(
        value_cache_ptr + heads * value_cache_head_stride + columns * value_cache_width_stride,
        narrow(value, value_cache_ptr.dtype.element_ty),
        mask=value_mask,
    )
