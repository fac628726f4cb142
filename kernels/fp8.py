"""Keys and values as float8 e4m3fn: written to the cache, and read back.

Formula: the nearest of the format's numbers, ties to even, with a scale of 1; what is beyond +-448
becomes +-448, and NaN stays NaN (a NaN among transposed values moves to its key). Writing is
arithmetic on bits, the same on every device. Reading is the device's own conversion from compute
capability 8.9 on, and elsewhere (where the kernels are given the cache as bytes) arithmetic again;
both are exact.

Format: sign, 4 bits of exponent with a bias of 7, 3 of mantissa; no infinity, and one NaN (OCP
8-bit floating point; Micikevicius et al. 2022, arXiv:2209.05433).
"""

import functools

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A float8 cache as bytes, for a kernel that writes it; another as it is."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def as_readable(cache: torch.Tensor) -> torch.Tensor:
    """A cache for a kernel that reads it: as bytes where the device converts no float8."""
    return cache if converts_fp8(cache.device) else as_bytes(cache)


def is_transposed(values: torch.Tensor) -> bool:
    """Whether a cache's values are float8 and transposed in their blocks: `[width, token]`,
    contiguous. None of them is NaN then (`without_nan`)."""
    *_, token_stride, width_stride = values.stride()
    return values.dtype == FP8 and token_stride == 1 < width_stride == values.shape[2]


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Whether Triton has float8 e4m3fn there; its interpreter rounds it wrongly (3.9.0)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def narrow(
    x,  # [...] any float
    DTYPE: tl.constexpr,  # the cache's; uint8 stands for float8 e4m3fn
):
    if tl.uint8 == DTYPE:
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        size = tl.minimum(tl.abs(x), 448.0)
        of_size = size.to(tl.int32, bitcast=True)
        # 20 of the 23 bits of the mantissa go: half of what goes is added, a tie goes to even. The
        # exponent's bias goes from 127 to 7.
        normal = ((of_size + 0x7FFFF + ((of_size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 the numbers are 2^-9 apart, as those after 2^14 do in float32.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(x != x, 0x7F, code)
        narrowed = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        narrowed = x.to(DTYPE)
    return narrowed


@triton.jit
def widen(
    stored,  # [...] as the cache holds it; uint8 stands for float8 e4m3fn
    DTYPE: tl.constexpr,
):
    if stored.dtype == tl.uint8:
        # float16 has the same fields, with one bit more of exponent and a bias of 15.
        code = stored.to(tl.int16)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        wide = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        wide = tl.where((code & 0x7F) == 0x7F, float("nan"), wide).to(DTYPE)
    else:
        wide = stored.to(DTYPE)
    return wide


@triton.jit
def without_nan(
    key,  # [HEADS, WIDTH] of a token
    value,  # [HEADS, WIDTH] float
):
    # Tensor cores multiply values as they are stored, those of dead tokens by a weight of 0, and
    # 0 * NaN is NaN. A NaN moves to the head's key instead: a row that sees the token becomes NaN.
    lost = value != value
    some = tl.max(lost.to(tl.int32), 1)
    return tl.where(some[:, None] > 0, float("nan"), key), tl.where(lost, 0.0, value)


@triton.jit
def in_float16(
    x,  # [ROWS, WIDTH] float32, of bfloat16
):  # [ROWS, WIDTH] float16 and [ROWS] float32, whose product is x
    # float16 has all the bits of a bfloat16 but not its range: a power of two brings a row's
    # largest to 2^14 or above, so that rounding errors are below 2^-24, relative to it.
    largest = tl.max(tl.abs(x), 1)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (x * up[:, None]).to(tl.float16), down
