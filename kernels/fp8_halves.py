# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
# (A kernel's arguments are Triton's own values and mypy cannot type them: what they hold stands in
# the comment behind each. Compile-time constants are written as constants.)
"""Scores of bfloat16 queries over float8 keys, multiplied in float8 without rounding the queries.

A bfloat16 has 8 bits of significand and float8 e4m3 has 4, so that a query is the sum of two float8
ones, its halves. A tile of a decode has 16 rows, of which a group of heads fills 8 at most: the
other half of the bits goes where there was nothing, and keys are multiplied as they lie in the
cache, by warp groups that take 64 of them. (To widen them first takes two instructions for four
numbers, in every turn of the loop.) An H100 keeps some 14 bits of such a sum.
"""

import triton
import triton.language as tl

from batchinfer.kernels.fp8 import narrow, widen


@triton.jit
def in_halves(
    x,  # [ROWS, WIDTH] float32, of bfloat16
    CACHE_TYPE: tl.constexpr,  # float8, or uint8 that stands for it
):  # [2 * ROWS, WIDTH] float8, upper halves before lower ones, and [ROWS] float32, their scale
    # A power of two brings a row's largest to 128 or above: what is below 2^-10 beside it is lost.
    largest = tl.max(tl.abs(x), 1)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 8), 253)
    up = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    down = tl.where(largest < float("inf"), down, float("nan"))
    x *= up[:, None]
    upper = narrow(x, CACHE_TYPE)
    lower = narrow(x - widen(upper, tl.float32), CACHE_TYPE)
    if tl.uint8 == CACHE_TYPE:
        upper, lower = widen(upper, tl.float16), widen(lower, tl.float16)
    return _one_above_the_other(upper, lower), down


@triton.jit
def dot_halves(
    halves,  # [2 * ROWS, WIDTH]
    key,  # [TILE, WIDTH] float8, or uint8 that stands for it
):  # [ROWS, TILE] float32
    if key.dtype != halves.dtype:
        key = widen(key, halves.dtype)
    scores = tl.dot(key, tl.trans(halves))
    pairs = tl.reshape(scores, [scores.shape[0], 2, scores.shape[1] // 2])
    return tl.trans(tl.sum(pairs, 1))


@triton.jit
def below_zeros(
    weights,  # [ROWS, TILE]
):  # [2 * ROWS, TILE], as many rows as tensor cores take
    # Zeros that nobody sees to be constant: they lie in shared memory as the weights do, and come
    # into registers with them, where constants are moved to every product anew.
    return _one_above_the_other(weights, weights * 0.0)


@triton.jit
def twice(
    x,  # [ROWS]
):  # [2 * ROWS]
    return tl.reshape(tl.broadcast_to(x[None, :], [2, x.shape[0]]), [2 * x.shape[0]])


@triton.jit
def _one_above_the_other(first, second):
    rows: tl.constexpr = first.shape[0]
    width: tl.constexpr = first.shape[1]
    return tl.reshape(tl.permute(tl.join(first, second), [2, 0, 1]), [2 * rows, width])
