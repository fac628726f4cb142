"""Converts keys and values to and from the float8 e4m3fn of a KV cache.

Formula: round to nearest, ties to even, with a scale of 1. Numbers beyond +-448 become +-448. NaN
stays NaN, except that a NaN among transposed values moves to the key of its token and head. The
conversion to float8 uses integer arithmetic, which is the same on every device. The conversion from
float8 is exact. From compute capability 8.9 on, a hardware instruction converts from float8; other
devices read the cache as bytes and use integer arithmetic.

Format: sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa; no infinity, and one NaN (OCP
8-bit floating point; Micikevicius et al. 2022, arXiv:2209.05433).
"""

import functools

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """View a float8 cache as bytes, for kernels that write it; return other caches unchanged."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def as_readable(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache for kernels that read it: a float8 cache as bytes if the device cannot convert
    float8, otherwise the cache itself."""
    return cache if converts_fp8(cache.device) else as_bytes(cache)


def is_transposed(values: torch.Tensor) -> bool:
    """Return true if blocks store values as contiguous float8 `[width, token]`.

    Transposed values are never NaN (`without_nan`).
    """
    *_, token_stride, width_stride = values.stride()
    return values.dtype == FP8 and token_stride == 1 < width_stride == values.shape[2]


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Return true if Triton can convert float8 e4m3fn on the device. The result is false in
    Triton's interpreter, which rounds wrongly in version 3.9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def narrow(
    x,  # [...] any float
    DTYPE: tl.constexpr,  # dtype of the cache; uint8 means float8 e4m3fn as bytes
):
    if tl.uint8 == DTYPE:
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        size = tl.minimum(tl.abs(x), 448.0)
        of_size = size.to(tl.int32, bitcast=True)
        # Drop 20 of the 23 mantissa bits, rounding half to even, and change the exponent's bias
        # from 127 to 7.
        normal = ((of_size + 0x7FFFF + ((of_size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6, float8 numbers are 2^-9 apart, like float32 numbers from 2^14 on.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(x != x, 0x7F, code)
        narrowed = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        narrowed = x.to(DTYPE)
    return narrowed


@triton.jit
def widen(
    stored,  # [...] in the cache's dtype; uint8 means float8 e4m3fn as bytes
    DTYPE: tl.constexpr,
):
    if stored.dtype == tl.uint8:
        # float16 has the same fields, with one more exponent bit, a bias of 15, and more mantissa
        # bits.
        code = stored.to(tl.int16)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        wide = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        wide = tl.where((code & 0x7F) == 0x7F, float("nan"), wide).to(DTYPE)
    else:
        wide = stored.to(DTYPE)
    return wide


@triton.jit
def without_nan(
    key,  # [HEADS, WIDTH] keys of a token
    value,  # [HEADS, WIDTH] float
):
    # Tensor cores multiply the stored values of unused tokens by a weight of 0, and 0 * NaN is NaN.
    # A NaN is therefore moved from the value to the head's key. Every row that sees the token still
    # becomes NaN.
    lost = value != value
    some = tl.max(lost.to(tl.int32), 1)
    return tl.where(some[:, None] > 0, float("nan"), key), tl.where(lost, 0.0, value)


@triton.jit
def in_float16(
    x,  # [ROWS, WIDTH] float32, converted from bfloat16
):  # [ROWS, WIDTH] float16 and [ROWS] float32, whose product is x
    # float16 has all mantissa bits of bfloat16 but not its range. Multiply each row by a power of
    # two, so that its largest number is at least 2^14. The absolute rounding errors of such a row
    # are below 2^-24.
    largest = tl.max(tl.abs(x), 1)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (x * up[:, None]).to(tl.float16), down
