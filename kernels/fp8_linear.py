"""Linear layers with float8 e4m3fn weights, scaled by 128 x 128 block.

Formula, with G groups of 128 columns (the last group may be shorter):

    out[t, n] = bias[n] + sum_g weight_scales[n // 128, g] x_scales[g, t]
                                sum_(k in g) weight[n, k] x[t, k]

x is float8 with a scale for every row and group (`quantize_groups`), or has 16 or 32 bits and no
scales. Without scales, weights are converted to the dtype of x in registers, which is exact.

Accumulation: tensor cores sum each group from zero. Group sums are scaled and added in float32, in
order. (An H100 keeps about 14 bits of a float8 sum, so longer sums would lose more bits.) If there
are few tiles, the groups are divided into pieces, and a second kernel adds the pieces' sums in
order. The same call of `fp8_linear` therefore always gives the same bits. The number of pieces is
the same for 1 to 64 rows.

Sources: DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2; the schedule is the same as in DeepGEMM
(deepseek-ai/DeepGEMM, sm90_fp8_gemm_1d2d) and in vLLM's `w8a8_block_fp8_matmul`
(vllm/model_executor/layers/quantization/utils/fp8_utils.py), except that for few rows the weight is
the first operand.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.fp8 import FP8, as_readable, widen
from batchinfer.kernels.fp8_blocks import BLOCK, check_blocks, num_blocks
from batchinfer.kernels.fp8_to_16_bits import widen_words
from batchinfer.kernels.launch import (
    OPTIONS,
    check_launchable,
    compute_capability,
    num_multiprocessors,
)
from batchinfer.kernels.linear_tiles import (
    FEW_ROWS,
    GROUPED,
    even_pieces,
    place_tile,
    sum_pieces,
)

# Largest number of pipeline stages. With few rows, each program then has 40 KiB of loads in flight.
_STAGES = 5
# Bytes of a multiprocessor's shared memory that operands may take: on devices with little shared
# memory (the compute capabilities in `_LITTLE_SHARED_MEMORY`), and on other devices.
_SHARED_MEMORY, _MORE_SHARED_MEMORY = 96 * 2**10, 160 * 2**10
_LITTLE_SHARED_MEMORY = (86, 89, 120)
_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@dataclass(frozen=True)
class _Tile:
    rows: int
    outputs: int
    num_warps: int
    num_stages: int
    weight_first: bool
    """True if the weight is the first operand of the GEMM, false if x is. A warp group takes 64
    rows of the first operand, and only this operand can be converted in registers."""


def fp8_linear(
    x: torch.Tensor,  # [T, K], last dimension contiguous; float8 if x_scales is given
    weight: torch.Tensor,  # [N, K] float8, contiguous
    weight_scales: torch.Tensor,  # [ceil(N / 128), G] float32, contiguous
    *,
    out: torch.Tensor,  # [T, N], contiguous; 16 or 32 bits
    x_scales: torch.Tensor | None = None,  # [G, T] float32, contiguous
    bias: torch.Tensor | None = None,  # [N]
    adds: bool = False,
    pieces: int | None = None,
) -> None:
    """Write x times the transposed weight to `out`, or add it to `out`.

    Args:
        adds: true to add the product to `out`, rounding once.
        pieces: largest number of pieces; None: enough to keep the device busy.
    """
    check_launchable("fp8_linear", x, weight, weight_scales, out, x_scales, bias)
    check_blocks("fp8_linear", weight, weight_scales)
    if (x.dtype == weight.dtype) != (x_scales is not None):
        raise ValueError(
            f"fp8_linear: x is {x.dtype}; x_scales are required for float8, and only for float8"
        )
    num_rows, (outputs, width) = len(x), weight.shape
    if x.shape[1] != width or x.stride(1) != 1:
        raise ValueError(
            f"fp8_linear: x is {list(x.shape)} with strides {x.stride()}; expected contiguous rows "
            f"of {width}"
        )
    if out.shape != (num_rows, outputs) or not out.is_contiguous():
        raise ValueError(
            f"fp8_linear: out is {list(out.shape)}; expected contiguous {[num_rows, outputs]}"
        )
    if num_rows == 0:
        return
    tile = _tile(num_rows, x.element_size(), compute_capability(x.device))
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    if pieces is None:
        pieces = num_pieces(num_rows, outputs, width, x.device)
    else:
        pieces = even_pieces(num_blocks(width), pieces)
    target = out if pieces == 1 else out.new_empty(pieces, *out.shape, dtype=torch.float32)
    readable = as_readable(weight)
    _fp8_linear_kernel[(tiles, pieces)](
        x.view(readable.dtype) if x_scales is not None else x,
        x_scales,
        readable,
        weight_scales,
        bias,
        target,
        x.stride(0),
        num_rows,
        triton.cdiv(num_blocks(width), pieces),
        OUTPUTS=outputs,
        WIDTH=width,
        DTYPE=_operand_dtype(x, readable),
        BY_WORDS=x.dtype != torch.float32 and not triton.knobs.runtime.interpret,
        WEIGHT_FIRST=tile.weight_first,
        ADDS=adds and pieces == 1,
        IN_PIECES=pieces > 1,
        BLOCK=BLOCK,
        ROWS=tile.rows,
        OUTPUTS_BLOCK=tile.outputs,
        GROUPED=GROUPED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **OPTIONS,
    )
    if pieces > 1:
        sum_pieces(target, bias, out, adds=adds)


def num_pieces(rows: int, outputs: int, width: int, device: torch.device) -> int:
    """Return the default number of pieces, which keeps the device busy."""
    tile = _tile(rows, 1, compute_capability(device))
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    # With few rows, a program occupies only a part of a multiprocessor.
    wanted = num_multiprocessors(device) * (2 if rows <= FEW_ROWS else 1) // tiles
    return even_pieces(num_blocks(width), wanted)


def _tile(rows: int, x_bytes: int, capability: int) -> _Tile:
    widens_in_registers = x_bytes == 2 and capability >= 90
    if rows <= 32:
        size, outputs, num_warps, weight_first = 16 if rows <= 16 else 32, 64, 4, True
    elif rows <= FEW_ROWS or x_bytes == 4:
        size, outputs, num_warps, weight_first = 64, 64, 4, widens_in_registers
    else:
        size, outputs, num_warps, weight_first = 128, 128, 8, widens_in_registers
    room = _SHARED_MEMORY if capability in _LITTLE_SHARED_MEMORY else _MORE_SHARED_MEMORY
    stages = room // (BLOCK * (size * x_bytes + outputs))
    return _Tile(size, outputs, num_warps, max(2, min(_STAGES, stages)), weight_first)


def _operand_dtype(x: torch.Tensor, readable: torch.Tensor) -> tl.dtype:
    """Return the dtype of x, or float16 if x is float8 and the device cannot multiply float8."""
    if x.dtype == FP8:
        return tl.float8e4nv if readable.dtype == FP8 else tl.float16
    return _TRITON_DTYPES[x.dtype]


@triton.jit(do_not_specialize=["num_rows", "piece_groups"])
def _fp8_linear_kernel(
    x_ptr,  # [T, K]
    x_scales_ptr,  # [G, T] float32, or None
    weight_ptr,  # [N, K] float8, or float8 viewed as uint8
    weight_scales_ptr,  # [ceil(N / 128), G] float32
    bias_ptr,  # [N], or None
    out_ptr,  # [T, N]; if IN_PIECES, [P, T, N] float32
    x_stride,
    num_rows,
    piece_groups,  # groups per piece
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,  # dtype of the operands
    BY_WORDS: tl.constexpr,  # convert float8 with `widen_words`
    WEIGHT_FIRST: tl.constexpr,
    ADDS: tl.constexpr,
    IN_PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a tile
    OUTPUTS_BLOCK: tl.constexpr,  # outputs of a tile; divides BLOCK
    GROUPED: tl.constexpr,
):
    row_tile, output_tile = place_tile(num_rows, OUTPUTS, ROWS, OUTPUTS_BLOCK, GROUPED)
    rows = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    outputs = (output_tile * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)).to(tl.int64)
    read_rows, read_outputs = tl.minimum(rows, num_rows - 1), tl.minimum(outputs, OUTPUTS - 1)
    columns = tl.arange(0, BLOCK)
    groups: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    first = tl.program_id(1) * piece_groups
    last = tl.minimum(first + piece_groups, groups)
    x_ptrs = x_ptr + read_rows[:, None] * x_stride + columns[None, :] + first * BLOCK
    weight_ptrs = weight_ptr + read_outputs[:, None] * WIDTH + columns[None, :] + first * BLOCK
    weight_scales_ptr += output_tile * OUTPUTS_BLOCK // BLOCK * groups + first
    weight_scale = tl.load(weight_scales_ptr)
    if x_scales_ptr is not None:
        x_scales_ptrs = x_scales_ptr + first * num_rows + read_rows
        x_scale = tl.load(x_scales_ptrs)
    if WEIGHT_FIRST:
        acc = tl.zeros([OUTPUTS_BLOCK, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, OUTPUTS_BLOCK], tl.float32)
    for group in range(first, last):
        if WIDTH % BLOCK == 0:
            x = tl.load(x_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            in_range = columns[None, :] < WIDTH - group * BLOCK
            x = tl.load(x_ptrs, mask=in_range, other=0.0)
            weight = tl.load(weight_ptrs, mask=in_range, other=0.0)
        # Load scales one iteration ahead, because Triton's pipeline loads only the operands ahead.
        is_last = group + 1 == last
        weight_scales_ptr += tl.where(is_last, 0, 1)
        next_weight_scale = tl.load(weight_scales_ptr)
        if x_scales_ptr is not None:
            x_scales_ptrs += tl.where(is_last, 0, num_rows)
            next_x_scale = tl.load(x_scales_ptrs)
        x, weight = _operand(x, DTYPE, BY_WORDS), _operand(weight, DTYPE, BY_WORDS)
        if WEIGHT_FIRST:
            product = tl.dot(weight, tl.trans(x), input_precision="ieee")
        else:
            product = tl.dot(x, tl.trans(weight), input_precision="ieee")
        if x_scales_ptr is None:
            acc += product * weight_scale
        elif WEIGHT_FIRST:
            acc += product * (x_scale * weight_scale)[None, :]
        else:
            acc += product * (x_scale * weight_scale)[:, None]
        weight_scale = next_weight_scale
        if x_scales_ptr is not None:
            x_scale = next_x_scale
        x_ptrs += BLOCK
        weight_ptrs += BLOCK
    if WEIGHT_FIRST:
        acc = tl.trans(acc)
    in_range = (rows[:, None] < num_rows) & (outputs[None, :] < OUTPUTS)
    if IN_PIECES:
        out_ptr += tl.program_id(1).to(tl.int64) * num_rows * OUTPUTS
    elif bias_ptr is not None:
        acc += tl.load(bias_ptr + read_outputs).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows[:, None] * OUTPUTS + outputs[None, :]
    if ADDS:
        acc += tl.load(out_ptrs, mask=in_range, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc, mask=in_range)


@triton.jit
def _operand(
    stored,  # [...] float8 (or float8 viewed as uint8), or DTYPE
    DTYPE: tl.constexpr,
    BY_WORDS: tl.constexpr,
):
    if stored.dtype == DTYPE:
        operand = stored
    elif BY_WORDS:
        operand = widen_words(stored, DTYPE)
    else:
        operand = widen(stored, DTYPE)
    return operand
