"""Finds each row's largest logit, its index and its log-probability in one pass.

Formula, for every row x:

    maximum = max_i x_i        argmax = the lowest i with x_i = maximum
    max_logprob = -log sum_i exp(x_i - maximum)

computed in float32 with an online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867). Every lane
of a program has its own maximum and sum, which are merged at the end. One program reads one row, so
a row's bits do not depend on other rows. If a row has NaN or +inf, or only -inf, the row's maximum
is not finite, and its other statistics are undefined.
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS, check_launchable

_BLOCK = 8192


def row_stats(
    logits: torch.Tensor,  # [R, V], last dimension contiguous
    *,
    maximum: torch.Tensor,  # [R] float32
    max_logprob: torch.Tensor,  # [R] float32
    argmax: torch.Tensor,  # [R] int64
) -> None:
    """Write each row's maximum, and the log-probability and index of the maximum."""
    check_launchable("row_stats", logits, maximum, max_logprob, argmax)
    num_rows, width = logits.shape
    if num_rows == 0:
        return
    _row_stats_kernel[(num_rows,)](
        logits,
        maximum,
        max_logprob,
        argmax,
        logits.stride(0),
        WIDTH=width,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=16 if width > 4096 else 4,
        **OPTIONS,
    )


@triton.jit
def _row_stats_kernel(
    logits_ptr,  # [R, V]
    maximum_ptr,  # [R] float32
    max_logprob_ptr,  # [R] float32
    argmax_ptr,  # [R] int64
    row_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + lanes
        x = tl.load(logits_ptr + columns, mask=columns < WIDTH, other=float("-inf"))
        best, best_at, total = add_logits(x.to(tl.float32), columns, best, best_at, total)
    maximum, max_logprob, at = merge_lanes(best, best_at, total, WIDTH)
    tl.store(maximum_ptr + row, maximum)
    tl.store(max_logprob_ptr + row, max_logprob)
    tl.store(argmax_ptr + row, at.to(tl.int64))


@triton.jit
def add_logits(
    x,  # [...] float32
    columns,  # [...] int32, larger than in earlier calls
    best,  # [...] float32, -inf in the first call
    best_at,  # [...] int32
    total,  # [...] float32, 0 in the first call
):
    """Add a logit to each lane: update the lane's maximum, the maximum's column, and the sum."""
    # Compute exp(-|x - old maximum|) without -inf - -inf, which is NaN. If x is the new maximum,
    # this factor scales the old sum; otherwise, the factor is the term of x.
    seen = tl.where(x == float("-inf"), 0.0, x)
    factor = tl.exp(-tl.abs(seen - tl.where(best == float("-inf"), seen, best)))
    factor = tl.where(x == float("-inf"), 0.0, factor)
    larger = x > best
    total = tl.where(larger, total * factor + 1.0, total + factor)
    best_at = tl.where(larger, columns, best_at)
    return tl.where(larger, x, best), best_at, total


@triton.jit
def merge_lanes(best, best_at, total, WIDTH: tl.constexpr):
    """Merge the lanes. Return the row's maximum, the maximum's log-probability and its first
    column."""
    maximum = tl.max(best)
    at = tl.min(tl.where(best == maximum, best_at, WIDTH))
    total = tl.sum(total * tl.exp(best - maximum))
    # If any logit is NaN, the sum is NaN. Only NaN differs from itself.
    return tl.where(total != total, total, maximum), -tl.log(total), at
