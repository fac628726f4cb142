"""Multiplies the rows of a mixture's tokens by the matrices of their experts.

Formula, for a token x with experts e_1 ... e_K and weights w_1 ... w_K (see `route.py`):

    out = sum_i w_i down[e_i] activation(gate_up[e_i] x)

`multiply_experts` computes the products of all experts of a layer in one launch, first of `gate_up`
with the activation, then of `down`. `add_experts` adds up the products of each token in float32, in
the order of i. No atomic operations are used.

A tile has 64 rows of one expert, and its shape does not depend on the number of rows. Programs for
tiles that do not exist return at once, so the number of programs depends only on the number of
tokens, and a CUDA graph can hold the launch. For each element of `gate`, a tile has the element of
`up` next to it, so that both are in the same thread.

Accumulation: float32. The result of the activation and the products are rounded to the dtype of
`out`. Activations:

    silu(gate) up                                            without a limit L
    (clamp(up, -L, L) + 1) g sigmoid(alpha g), g = min(gate, L)    with a limit (gpt-oss)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS, check_launchable
from batchinfer.kernels.route import TILE_ROWS, ExpertWork

_GROUPED = 8  # tiles of rows that read the same tile of a weight one after the other
_BLOCK = 1024  # columns per program of `add_experts`


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of each expert."""

    weight: torch.Tensor  # [E, N, K]; the last or the second dimension is contiguous
    bias: torch.Tensor | None = None  # [E, N], contiguous
    shared: torch.Tensor | None = None
    """The joined matrices of shared experts, contiguous: [2 * num_shared * N / 2, K] with all gates
    first for the gates, [N, num_shared * K] for `down`."""
    num_shared: int = 0


@dataclass(frozen=True)
class GatedActivation:
    """What follows the product with `gate_up`."""

    interleaved: bool = False
    """True if outputs are gate, up, gate, up, ...; False if all gates come first."""
    alpha: float = 1.0
    limit: float | None = None


def multiply_experts(
    x: torch.Tensor,  # [T, K] with an activation, else [S, K] in the order of `work.pairs`
    work: ExpertWork,
    matrix: ExpertMatrix,
    *,
    out: torch.Tensor,  # [S, N / 2] in this order with an activation, else [S, N] by pair
    activation: GatedActivation | None = None,
) -> None:
    """Multiply each pair's row by the matrix of its expert. S is the number of pairs.

    Raises:
        ValueError: shapes, strides or dtypes do not match.
    """
    check_launchable("multiply_experts", x, matrix.weight, matrix.bias, matrix.shared, out)
    _check(x, work, matrix, out, activation)
    if work.pairs.numel() == 0:
        return
    num_experts, outputs, depth = matrix.weight.shape
    most_tiles = work.tiles.shape[1]
    is_wide = x.element_size() == 4
    outputs_block = 32 if is_wide else 128
    limit = None if activation is None else activation.limit
    _multiply_experts_kernel[(most_tiles * triton.cdiv(outputs, outputs_block),)](
        x,
        work.pairs,
        work.tiles,
        work.num_tiles,
        matrix.weight,
        matrix.bias,
        matrix.shared,
        out,
        x.stride(0),
        *matrix.weight.stride(),
        most_tiles,
        1.0 if activation is None else activation.alpha,
        0.0 if limit is None else limit,
        EXPERTS=num_experts,
        SHARED=matrix.num_shared,
        OUTPUTS=outputs,
        DEPTH=depth,
        PER_TOKEN=work.per_token,
        GATED=activation is not None,
        INTERLEAVED=activation is not None and activation.interleaved,
        TRANSPOSED=matrix.weight.stride(2) != 1,
        LIMITED=limit is not None,
        ROWS=TILE_ROWS,
        OUTPUTS_BLOCK=outputs_block,
        DEPTH_BLOCK=16 if is_wide else 64,
        GROUPED=_GROUPED,
        num_warps=8 if is_wide else 4,
        num_stages=3 if is_wide else 4,
        **OPTIONS,
    )


def _check(
    x: torch.Tensor,
    work: ExpertWork,
    matrix: ExpertMatrix,
    out: torch.Tensor,
    activation: GatedActivation | None,
) -> None:
    _, outputs, depth = matrix.weight.shape
    num_pairs = work.pairs.numel()
    rows = num_pairs if activation is None else num_pairs // work.per_token
    width = outputs if activation is None else outputs // 2
    if x.shape != (rows, depth) or x.stride(1) != 1 or x.dtype != matrix.weight.dtype:
        raise ValueError(
            f"multiply_experts: x is {list(x.shape)} {x.dtype}; expected contiguous rows "
            f"{[rows, depth]} {matrix.weight.dtype}"
        )
    if out.shape != (num_pairs, width) or not out.is_contiguous():
        raise ValueError(
            f"multiply_experts: out is {list(out.shape)}; expected contiguous {[num_pairs, width]}"
        )
    if 1 not in matrix.weight.stride()[1:]:
        raise ValueError(
            f"multiply_experts: weights have strides {matrix.weight.stride()}; expected contiguous "
            "outputs or contiguous rows"
        )
    if matrix.shared is None:
        return
    if matrix.weight.stride(2) != 1 or matrix.bias is not None:
        raise ValueError("multiply_experts: shared experts need contiguous rows and no biases")
    shape = [outputs, matrix.num_shared * depth]
    if activation is not None:
        shape = [matrix.num_shared * outputs, depth]
    if list(matrix.shared.shape) != shape or not matrix.shared.is_contiguous():
        raise ValueError(
            f"multiply_experts: shared experts have {list(matrix.shared.shape)}; expected {shape}"
        )


def add_experts(
    products: torch.Tensor,  # [T * per_token, W], contiguous
    weights: torch.Tensor,  # [T, per_token] float32, contiguous
    *,
    out: torch.Tensor,  # [T, W], last dimension contiguous
    adds: bool = False,
) -> None:
    """Write the weighted sum of each token's products to `out`, or add it to `out`."""
    check_launchable("add_experts", products, weights, out)
    (num_rows, width), per_token = out.shape, weights.shape[1]
    if num_rows == 0:
        return
    _add_experts_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        products,
        weights,
        out,
        out.stride(0),
        WIDTH=width,
        PER_TOKEN=per_token,
        ADDS=adds,
        BLOCK=_BLOCK,
        num_warps=4,
        **OPTIONS,
    )


@triton.jit(do_not_specialize=["most_tiles", "alpha", "limit"])
def _multiply_experts_kernel(
    x_ptr,  # [T, K] if GATED, else [S, K]
    pairs_ptr,  # [S] int32
    tiles_ptr,  # [3, most_tiles] int32
    num_tiles_ptr,  # [1] int32
    weight_ptr,  # [E, N, K]
    bias_ptr,  # [E, N] or None
    shared_ptr,  # [SHARED * N, K] if GATED, else [N, SHARED * K]; or None
    out_ptr,  # [S, N / 2] if GATED, else [S, N]
    x_stride,
    expert_stride,
    output_stride,
    depth_stride,
    most_tiles,
    alpha,
    limit,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # outputs are contiguous
    LIMITED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
):
    # For each tile of outputs, the programs for GROUPED tiles of rows are consecutive.
    group_size = GROUPED * tl.cdiv(OUTPUTS, OUTPUTS_BLOCK)
    first_tile = tl.program_id(0) // group_size * GROUPED
    num_grouped = tl.minimum(most_tiles - first_tile, GROUPED)
    place = tl.program_id(0) % group_size
    tile = first_tile + place % num_grouped
    first_output = place // num_grouped * OUTPUTS_BLOCK
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tiles_ptr + tile)
    start = tl.load(tiles_ptr + most_tiles + tile)
    end = tl.load(tiles_ptr + 2 * most_tiles + tile)

    # Rows and outputs past the end read the last row or output again. This needs no mask, because
    # no sum mixes rows or outputs. If outputs are contiguous, a mask keeps loads contiguous.
    rows = start + tl.arange(0, ROWS)
    read_rows = tl.minimum(rows, end - 1).to(tl.int64)
    pairs = tl.load(pairs_ptr + read_rows).to(tl.int64)
    if GATED:
        x_ptrs = x_ptr + (pairs // PER_TOKEN)[:, None] * x_stride
    else:
        x_ptrs = x_ptr + read_rows[:, None] * x_stride
    outputs = first_output + tl.arange(0, OUTPUTS_BLOCK)
    is_output = outputs < OUTPUTS
    read_outputs = outputs.to(tl.int64)
    if not TRANSPOSED:
        read_outputs = tl.minimum(outputs, OUTPUTS - 1).to(tl.int64)
    weight_ptr += expert.to(tl.int64) * expert_stride
    up_starts = OUTPUTS // 2
    if shared_ptr is not None:
        is_shared = expert >= EXPERTS
        up_starts = tl.where(is_shared, SHARED * (OUTPUTS // 2), OUTPUTS // 2)
        if GATED:
            shared_ptr += (expert - EXPERTS).to(tl.int64) * (OUTPUTS // 2 * DEPTH)
        else:
            shared_ptr += (expert - EXPERTS).to(tl.int64) * DEPTH
            output_stride = tl.where(is_shared, SHARED * DEPTH, output_stride)
        weight_ptr = tl.where(is_shared, shared_ptr, weight_ptr)
    weight_rows = read_outputs
    if GATED and not INTERLEAVED:
        weight_rows = read_outputs % 2 * up_starts + read_outputs // 2
    if TRANSPOSED:
        weight_ptrs = weight_ptr + weight_rows[None, :] * output_stride
    else:
        weight_ptrs = weight_ptr + weight_rows[:, None] * output_stride

    acc = tl.zeros([ROWS, OUTPUTS_BLOCK], tl.float32)
    for first in range(0, DEPTH, DEPTH_BLOCK):
        columns = first + tl.arange(0, DEPTH_BLOCK)
        in_range = columns < DEPTH
        if DEPTH % DEPTH_BLOCK == 0:
            x = tl.load(x_ptrs + columns[None, :])
        else:
            x = tl.load(x_ptrs + columns[None, :], mask=in_range[None, :], other=0.0)
        if TRANSPOSED:
            mask = is_output[None, :] & in_range[:, None]
            ptrs = weight_ptrs + columns.to(tl.int64)[:, None] * depth_stride
            weight = tl.load(ptrs, mask=mask, other=0.0)
        elif DEPTH % DEPTH_BLOCK == 0:
            weight = tl.trans(tl.load(weight_ptrs + columns[None, :]))
        else:
            ptrs = weight_ptrs + columns[None, :]
            weight = tl.trans(tl.load(ptrs, mask=in_range[None, :], other=0.0))
        acc = tl.dot(x, weight, acc, input_precision="ieee")

    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * OUTPUTS
        bias = tl.load(bias_ptr + weight_rows, mask=is_output, other=0.0)
        acc += bias[None, :].to(tl.float32)
    if GATED:
        width: tl.constexpr = OUTPUTS // 2
        gate, up = tl.split(tl.reshape(acc, [ROWS, OUTPUTS_BLOCK // 2, 2]))
        columns = first_output // 2 + tl.arange(0, OUTPUTS_BLOCK // 2)
        if LIMITED:
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            result = (up + 1) * gate * tl.sigmoid(alpha * gate)
        else:
            result = gate * tl.sigmoid(gate) * up
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
        in_range = (rows < end)[:, None] & (columns < width)[None, :]
        tl.store(out_ptrs, result, mask=in_range)
    else:
        out_ptrs = out_ptr + pairs[:, None] * OUTPUTS + outputs[None, :]
        in_range = (rows < end)[:, None] & is_output[None, :]
        tl.store(out_ptrs, acc, mask=in_range)


@triton.jit
def _add_experts_kernel(
    products_ptr,  # [T, PER_TOKEN, W]
    weights_ptr,  # [T, PER_TOKEN] float32
    out_ptr,  # [T, W]
    out_stride,
    WIDTH: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(PER_TOKEN):
        pair = token * PER_TOKEN + place
        product = tl.load(products_ptr + pair * WIDTH + columns, mask=mask, other=0.0)
        total += tl.load(weights_ptr + pair) * product.to(tl.float32)
    out_ptrs = out_ptr + token * out_stride + columns
    if ADDS:
        total += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, total, mask=mask)
