"""Copies packed block tables to rows at fixed addresses.

Formula, for every group g, sequence s < count and block b < width, with (count, width) = shape:

    tables[g, s, b] = packed[(g * count + s) * width + b]

The shape is read on the device, so that one captured launch works for steps of all shapes. Elements
of `tables` outside this shape are not changed.
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS, check_launchable

_BLOCK = 1024


def unpack_block_tables(
    packed: torch.Tensor,  # [N] int32, N >= G * count * width
    shape: torch.Tensor,  # [2] int32: count <= S, width <= max_blocks
    tables: torch.Tensor,  # [G, S, max_blocks] int32, last dimension contiguous
) -> None:
    check_launchable("unpack_block_tables", packed, shape, tables)
    groups, sequences, max_blocks = tables.shape
    if tables.numel() == 0:
        return
    _unpack_block_tables_kernel[(sequences, groups, triton.cdiv(max_blocks, _BLOCK))](
        packed,
        shape,
        tables,
        *tables.stride()[:2],
        BLOCK=_BLOCK,
        **OPTIONS,
    )


@triton.jit
def _unpack_block_tables_kernel(
    packed_ptr,  # [N] int32
    shape_ptr,  # [2] int32
    tables_ptr,  # [G, S, max_blocks] int32
    group_stride,
    sequence_stride,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    count = tl.load(shape_ptr)
    width = tl.load(shape_ptr + 1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_range = columns < tl.where(sequence < count, width, 0)
    blocks = tl.load(packed_ptr + (group * count + sequence) * width + columns, mask=in_range)
    tables_ptr += group * group_stride + sequence * sequence_stride
    tl.store(tables_ptr + columns, blocks, mask=in_range)
