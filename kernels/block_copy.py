"""Copies whole blocks between slots of the KV pool.

Formula, for every pair c:

    pool[pairs[c, 1], ...] = pool[pairs[c, 0], ...]

Layout: a block is a contiguous row with the keys and values of all layers, or one row per layer.
The kernel copies bits, so it works for every dtype.

Source: copy-on-write of shared blocks in PagedAttention (Kwon et al. 2023, arXiv:2309.06180).
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.fp8 import as_bytes
from batchinfer.kernels.launch import OPTIONS, check_launchable

# Number of elements that one program copies. A block of a real model has 10^5 to 10^7 elements, so
# even a single pair occupies all multiprocessors.
_CHUNK = 4096


def block_copy(
    pool: torch.Tensor,  # [num_slots, elems] or [num_slots, parts, elems], elems contiguous
    pairs: torch.Tensor,  # [C, 2] int32 or int64, contiguous: source slot, destination slot
) -> None:
    """Copy blocks within the pool.

    The order of copies is not defined. Destinations must be distinct, and no destination may also
    be a source.
    """
    check_launchable("block_copy", pool, pairs)
    if pool.stride(-1) != 1 or not pairs.is_contiguous():
        raise ValueError("block_copy: the pairs and the elements of a slot must be contiguous")
    pool = as_bytes(pool)
    if pool.is_contiguous():
        pool = pool.flatten(1)
    if pool.dim() == 2:
        pool = pool.unsqueeze(1)
    _, num_parts, part_elems = pool.shape
    if pairs.shape[0] == 0:
        return
    grid = (pairs.shape[0], triton.cdiv(part_elems, _CHUNK), num_parts)
    slot_stride, part_stride, _ = pool.stride()
    _block_copy_kernel[grid](
        pool, pairs, slot_stride, part_stride, part_elems, CHUNK=_CHUNK, **OPTIONS
    )


@triton.jit
def _block_copy_kernel(
    pool_ptr,  # [num_slots, parts, part_elems]
    pairs_ptr,  # [C, 2]
    slot_stride,
    part_stride,
    part_elems,
    CHUNK: tl.constexpr,
):
    pair = tl.program_id(0)
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
    destination = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = columns < part_elems
    pool_ptr += tl.program_id(2).to(tl.int64) * part_stride
    elements = tl.load(pool_ptr + source * slot_stride + columns, mask=mask)
    tl.store(pool_ptr + destination * slot_stride + columns, elements, mask=mask)
