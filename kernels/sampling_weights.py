"""Rows of logits as the sampling kernel reads them: edited values, keys, integer weights.

A tile is `WIDTH` neighbors of a row, as many as a warp loads at once, so that sums over a tile stay
within a warp. A program reads `SEGMENTS` tiles at a time, [SEGMENTS, WIDTH].

Formula of a weight, for a logit x of a row whose largest is m, at temperature t:

    w(x) = floor(2^40 exp((x - m) / t)), or 0 where exp((x - m) / t) < min_p

The division is rounded as IEEE 754 has it (Markstein 1990, IBM Journal of Research and Development
34:1: a quotient by a rounded reciprocal, corrected once). exp is the polynomial of
`cpu/element_types.h`, with the fused multiply-adds that compilers make of it: the same logits give
the same bits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Below every key: that of -inf is larger.
LOWEST_KEY: tl.constexpr = tl.constexpr(-(2**31))

_LOG2_E: tl.constexpr = tl.constexpr(1.44269504)
_MINUS_LN_2: tl.constexpr = tl.constexpr(-0.6931471805599453)
# Added and taken off again, it rounds a number below 2^22 to the nearest integer.
_ROUND: tl.constexpr = tl.constexpr(12582912.0)
_WEIGHT_OF_MAX: tl.constexpr = tl.constexpr(2.0**40)


class RowShape(NamedTuple):
    """Constants of rows and of how programs read them; a kernel takes them as one argument."""

    VOCAB: Any
    READABLE: Any  # elements of a row that may be read
    SEGMENTS: Any
    WIDTH: Any
    FOUND: Any  # tokens of a segment that a pass writes down; 0: nothing is filtered
    SHIFT: Any  # low bits that keys do not have


@triton.jit
def load_logits(row, columns, shape):
    """The model's logits and the edited ones, float32; -inf outside of the row.

    A row is a tuple: logits [VOCAB]; edited logits [VOCAB] float32, or None; where they are,
    [VOCAB / 32] int32, or None; whether no other tokens are allowed.
    """
    logits_ptr, values_ptr, present_ptr, restricted = row
    raw = tl.load(logits_ptr + columns, mask=columns < shape.READABLE, other=float("-inf"))
    raw = raw.to(tl.float32)
    if shape.READABLE != shape.VOCAB:
        raw = tl.where(columns < shape.VOCAB, raw, float("-inf"))
    x = raw
    if values_ptr is not None:
        words = tl.load(present_ptr + columns // 32, mask=columns < shape.VOCAB, other=0)
        present = ((words >> (columns % 32)) & 1) == 1
        values = tl.load(values_ptr + columns, mask=present, other=0.0)
        x = tl.where(present, values, tl.where(restricted, float("-inf"), raw))
    return raw, x


@triton.jit
def sort_keys(x, SHIFT: tl.constexpr):
    """int32 in the order of float32 `x`, less the bits that its type does not have."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, which it is equal to
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def weigh(x, scale):
    """Weights, int64; `scale` is (largest logit, temperature, 1 / temperature rounded, min_p)."""
    top, temperature, inverse, min_p = scale
    # Logits further below have no weight, and -inf would make NaN.
    distance = tl.maximum(x - top, -88.0 * temperature)
    y = distance * inverse
    y = tl.fma(tl.fma(-y, temperature + 0.0 * y, distance), inverse + 0.0 * y, y)
    n = (y * _LOG2_E + _ROUND) - _ROUND
    r = tl.fma(n, tl.full(n.shape, _MINUS_LN_2, tl.float32), y)
    p = tl.full(r.shape, 1.9875691e-4, tl.float32)
    p = tl.fma(p, r, tl.full(r.shape, 1.3981999e-3, tl.float32))
    p = tl.fma(p, r, tl.full(r.shape, 8.3334519e-3, tl.float32))
    p = tl.fma(p, r, tl.full(r.shape, 4.1665796e-2, tl.float32))
    p = tl.fma(p, r, tl.full(r.shape, 1.6666665e-1, tl.float32))
    p = tl.fma(p, r, tl.full(r.shape, 5.0000001e-1, tl.float32))
    one = tl.full(r.shape, 1.0, tl.float32)
    p = tl.fma(r, tl.fma(p, r, one), one)
    scale = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    relative = p * scale
    weights = (relative * _WEIGHT_OF_MAX).to(tl.int64)
    return tl.where(relative < min_p, tl.zeros_like(weights), weights)


@triton.jit
def is_kept(keys, columns, cut, last):
    """Whether tokens come, in the order of most likely, before or at token `last` of key `cut`."""
    return (keys > cut) | ((keys == cut) & (columns <= last))


@triton.jit
def last_reaching(keys, measures, goal, low, high):
    """The largest key for which the measures of that key and larger ones reach the goal.

    It is at least `low`, which reaches it, and at most `high`.
    """
    while low < high:
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
        reached = tl.sum(tl.where(keys >= middle, measures, tl.zeros_like(measures))) >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low
