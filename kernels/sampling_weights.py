"""Loads rows of logits for sampling, and computes their sort keys and integer weights.

A tile has `WIDTH` adjacent logits, which one warp loads at once and sums. A program reads
`SEGMENTS` tiles at a time, as [SEGMENTS, WIDTH].

The weight of a logit x, in a row with largest logit m, at temperature t:

    w(x) = floor(2^40 exp((x - m) / t)), or 0 where exp((x - m) / t) < min_p

The quotient is rounded as in IEEE 754: x - m is multiplied by the rounded reciprocal of t, and the
product is corrected once (Markstein 1990, IBM Journal of Research and Development 34:1). exp is the
polynomial of `cpu/element_types.h`, with the fused multiply-adds that C compilers use, so that
equal logits have the same weights on a CPU.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# A key that is smaller than the key of any logit, including -inf.
LOWEST_KEY: tl.constexpr = tl.constexpr(-(2**31))

_LOG2_E: tl.constexpr = tl.constexpr(1.44269504)
_MINUS_LN_2: tl.constexpr = tl.constexpr(-0.6931471805599453)
# Adding and subtracting this constant rounds a number below 2^22 to the nearest integer.
_ROUND: tl.constexpr = tl.constexpr(12582912.0)
_WEIGHT_OF_MAX: tl.constexpr = tl.constexpr(2.0**40)


class RowShape(NamedTuple):
    """Constants of rows and tiles, which kernels take as one argument."""

    VOCAB: Any
    READABLE: Any  # number of elements of a row that may be read
    SEGMENTS: Any
    WIDTH: Any
    CANDIDATES: Any  # largest number of candidates that a pass stores per segment; 0: no filters
    SHIFT: Any  # number of low bits that keys omit


@triton.jit
def load_logits(row, columns, shape):
    """Return the model's logits and the edited logits in float32; -inf outside the row.

    A row is a tuple: logits [VOCAB]; edited logits [VOCAB] float32, or None; a bit for each token,
    set if the token is edited, [VOCAB / 32] int32, or None; true if tokens that are not edited are
    forbidden.
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
    """Return int32 keys that sort like float32 `x`. The SHIFT low bits are dropped."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # turns -0.0 into 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def weigh(x, scale):
    """Return int64 weights; `scale` is (largest logit, temperature, 1 / temperature, min_p)."""
    top, temperature, inverse, min_p = scale
    # Clamp the distance, because -inf would become NaN. Logits at a larger distance have weight 0
    # anyway.
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
    """Return a mask of the tokens up to and including the last kept token, which has the key `cut`
    and the id `last`. Tokens are ordered by descending key, then by ascending id."""
    return (keys > cut) | ((keys == cut) & (columns <= last))


@triton.jit
def last_reaching(keys, measures, goal, low, high):
    """Return the largest key in [low, high] for which the measures of all tokens with this key or
    larger keys add up to at least `goal`. The key `low` must meet this condition."""
    while low < high:
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
        reached = tl.sum(tl.where(keys >= middle, measures, tl.zeros_like(measures))) >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low
