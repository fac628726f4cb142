"""Batch-invariant matrix multiplication: a row's bits do not depend on the number of rows.

Formula, for every row t and output n:

    out[t, n] = bias[n] + sum_k x[t, k] weight[n, k]      (plus out[t, n] with `adds`)

cuBLAS chooses tiles and split-K based on the number of rows. In this kernel, the launch shape
depends only on the weight, and a program sums each output from the first k to the last. In return,
a tile with few rows takes as long as a full tile.

Accumulation: float32, rounded to the dtype of `out` once; float32 inputs are multiplied in full
float32 (no TF32).

Sources: batch_invariant_ops (He and Thinking Machines Lab 2025, "Defeating Nondeterminism in LLM
Inference") and vLLM's `VLLM_BATCH_INVARIANT` also use one configuration for all numbers of rows.
The order of tiles is from Triton's matmul tutorial.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS, check_launchable

_ROW_TILES = 8  # tiles of rows that read the same tile of weights while it is in the L2 cache
# From this number of outputs on, wide tiles occupy most of an H100's multiprocessors for 256 rows.
_MANY_OUTPUTS = 6144


@dataclass(frozen=True)
class ProductConfig:
    """The shape of one program."""

    rows: int
    outputs: int
    depth: int  # elements of the sum per loop iteration
    num_warps: int
    num_stages: int


def product_config(weight: torch.Tensor) -> ProductConfig:
    """Return the launch shape for a weight [N, K], which must not depend on the number of rows.

    A tile has 128 rows, 64 for each of two warp groups. For weights with few outputs, tiles are
    narrow, so that more multiprocessors are busy. float32 tiles are smaller, because tensor cores
    do not multiply float32.
    """
    if weight.element_size() == 4:
        return ProductConfig(rows=64, outputs=64, depth=16, num_warps=8, num_stages=3)
    outputs = 128 if len(weight) >= _MANY_OUTPUTS else 64
    return ProductConfig(rows=128, outputs=outputs, depth=64, num_warps=8, num_stages=4)


def matmul(
    x: torch.Tensor,  # [M, K], last dimension contiguous
    weight: torch.Tensor,  # [N, K], last dimension contiguous
    bias: torch.Tensor | None = None,  # [N]
    *,
    out: torch.Tensor,  # [M, N], last dimension contiguous
    adds: bool = False,  # add to `out` instead of overwriting it
) -> None:
    check_launchable("matmul", x, weight, bias, out)
    (num_rows, depth), num_outputs = x.shape, len(weight)
    assert weight.shape[1] == depth, "rows and weight differ in width"
    assert out.shape == (num_rows, num_outputs), "out has the wrong shape"
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    if num_rows == 0:
        return
    config = product_config(weight)
    tiles = triton.cdiv(num_rows, config.rows) * triton.cdiv(num_outputs, config.outputs)
    _matmul_kernel[(tiles,)](
        x,
        weight,
        bias,
        out,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        num_rows,
        OUTPUTS=num_outputs,
        DEPTH=depth,
        ADDS=adds,
        ROWS=config.rows,
        OUTPUTS_BLOCK=config.outputs,
        DEPTH_BLOCK=config.depth,
        ROW_TILES=_ROW_TILES,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **OPTIONS,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N] or None
    out_ptr,  # [M, N]
    x_stride,
    weight_stride,
    out_stride,
    num_rows,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    # For each tile of outputs, the programs for ROW_TILES tiles of rows are consecutive.
    group_size = ROW_TILES * tl.cdiv(OUTPUTS, OUTPUTS_BLOCK)
    first_tile = tl.program_id(0) // group_size * ROW_TILES
    tiles = tl.minimum(tl.cdiv(num_rows, ROWS) - first_tile, ROW_TILES)
    place = tl.program_id(0) % group_size
    rows = ((first_tile + place % tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    outputs = place // tiles * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)

    # Rows and outputs past the end read the last row or output again. No mask is needed, because no
    # sum mixes rows or outputs.
    x_ptrs = x_ptr + tl.minimum(rows, num_rows - 1)[:, None] * x_stride
    weight_rows = tl.minimum(outputs, OUTPUTS - 1).to(tl.int64)
    weight_ptrs = weight_ptr + weight_rows[:, None] * weight_stride
    acc = tl.zeros([ROWS, OUTPUTS_BLOCK], tl.float32)
    for first in range(0, DEPTH, DEPTH_BLOCK):
        columns = (first + tl.arange(0, DEPTH_BLOCK))[None, :]
        if DEPTH % DEPTH_BLOCK == 0:
            x = tl.load(x_ptrs + columns)
            weight = tl.load(weight_ptrs + columns)
        else:
            x = tl.load(x_ptrs + columns, mask=columns < DEPTH, other=0.0)
            weight = tl.load(weight_ptrs + columns, mask=columns < DEPTH, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")

    in_range = (rows[:, None] < num_rows) & (outputs[None, :] < OUTPUTS)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + outputs, mask=outputs < OUTPUTS, other=0.0)
        acc += bias[None, :].to(tl.float32)
    out_ptrs = out_ptr + rows[:, None] * out_stride + outputs[None, :]
    if ADDS:
        acc += tl.load(out_ptrs, mask=in_range, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc, mask=in_range)
