# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
# (A kernel's arguments are Triton's own values and mypy cannot type them: what they hold stands in
# the comment behind each. Compile-time constants are written as constants.)
"""Copy whole blocks between slots of the KV pool.

Formula, for every pair c:

    pool[pairs[c, 1], :] = pool[pairs[c, 0], :]

Layout: the pool is block-major, so that a block is one contiguous row of `slot_elems` elements
holding every layer's keys and values. Bits are moved as they are; nothing is accumulated.
Source: copy-on-write of shared blocks in PagedAttention (Kwon et al. 2023, arXiv:2309.06180).
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.fp8 import as_bytes
from batchinfer.kernels.launch import OPTIONS, check_launchable

# Elements one program moves. A block of a real model has 10^5 to 10^7 elements, so that even one
# pair gives every multiprocessor work.
_CHUNK = 4096


def block_copy(
    pool: torch.Tensor,  # [num_slots, slot_elems], contiguous
    pairs: torch.Tensor,  # [C, 2] int32 or int64, contiguous: source slot, destination slot
) -> None:
    """Copy block by block, in place.

    The pairs run in no order: destinations are distinct, and none is also a source.
    """
    check_launchable("block_copy", pool, pairs)
    if not pool.is_contiguous() or not pairs.is_contiguous():
        raise ValueError("block_copy: pool and pairs must be contiguous")
    pool = as_bytes(pool)
    slot_elems = pool.shape[1]
    if pairs.shape[0] == 0:
        return
    grid = (pairs.shape[0], triton.cdiv(slot_elems, _CHUNK))
    _block_copy_kernel[grid](pool, pairs, slot_elems, CHUNK=_CHUNK, **OPTIONS)


@triton.jit
def _block_copy_kernel(
    pool_ptr,  # [num_slots, slot_elems]
    pairs_ptr,  # [C, 2]
    slot_elems,  # elements of a block
    CHUNK: tl.constexpr,
):
    pair = tl.program_id(0)
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
    destination = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = columns < slot_elems
    elements = tl.load(pool_ptr + source * slot_elems + columns, mask=mask)
    tl.store(pool_ptr + destination * slot_elems + columns, elements, mask=mask)
