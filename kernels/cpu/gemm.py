"""Packs weights for the C kernels, and calls the C kernels' GEMMs."""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.compiled_library import (
    INT32,
    INT64,
    POINTER,
    SUFFIX,
    chosen,
    kernels_by_suffix,
    kernels_of,
    load,
)
from batchinfer.kernels.cpu.huge_pages import HugePages
from batchinfer.kernels.low_bit import (
    Float8GroupedWeight,
    GroupedWeight,
    Int4Weight,
    Int8Weight,
    LowBitWeight,
)

_MANY_ROWS = 8
# Addresses that are a multiple of this number of bytes apart map to the same set of the L1 cache.
_CACHE_PERIOD = 4096
_CACHE_LINE = 64
_KINDS = {1: "int8", 2: "groups"}
"""Kinds of packed weights whose GEMMs also round rows, keyed by their numbers in
``arguments.h``."""
_MEMORY = HugePages()


def aliases_cache_sets(row_bytes: int) -> bool:
    """Return true if rows with this stride map to the same cache sets, and therefore evict each
    other."""
    return row_bytes % _CACHE_PERIOD == 0


def padded_rows(count: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor [count, width] whose rows do not all map to the same cache
    sets."""
    size = like.element_size()
    padding = _CACHE_LINE // size if aliases_cache_sets(width * size) else 0
    return like.new_empty(count, width + padding)[:, :width]


class GemmArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("x", "packed", "bias", "out")),
        *((name, INT64) for name in ("num_rows", "row_stride", "in_features", "out_features")),
        *((name, INT32) for name in ("num_threads", "adds")),
    )


class _PackArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("weight", "scales", "factors", "zeros")),
        *((name, POINTER) for name in ("table", "order", "packed")),
        *((name, INT64) for name in ("in_features", "out_features", "group")),
        *((name, INT32) for name in ("num_threads", "kernel", "bits")),
    )


def supports(weight: torch.Tensor) -> bool:
    """Return true if the C kernels can be compiled and support a weight [out, in]."""
    if load() is None or weight.dtype not in SUFFIX:
        return False
    return weight.dtype == torch.float32 or weight.shape[1] % 2 == 0  # bfloat16 is read in pairs


def available(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of the instruction sets for GEMMs of ``dtype`` on this machine, the fastest
    first. Names are, for example, "AMX", "AVX-512 BF16", "NEON" or "plain C". Equal names give
    equal bits.
    """
    return tuple(kernels_of(load(), "gemm", dtype))


def instructions(dtype: torch.dtype) -> str:
    return available(dtype)[0]


def instructions_of(packed: torch.Tensor) -> str:
    """Return the name of the instructions that a weight was packed for. For low-bit weights, return
    "int8" or "groups", because all instruction sets give the same bits."""
    number, kind = packed[: 8 // packed.element_size()].view(torch.int32).tolist()
    if kind in _KINDS:
        return _KINDS[kind]
    kernels = kernels_of(load(), "gemm", packed.dtype)
    return next(name for name in kernels if kernels[name] == number)


def pack(weight: torch.Tensor, instructions: str | None = None) -> torch.Tensor:
    """Pack a weight [out, in] into a flat tensor: a header with the kernel's number, then panels of
    outputs.

    Args:
        instructions: an element of ``available``; None: the fastest.
    """
    kernel = chosen(kernels_of(load(), "gemm", weight.dtype), instructions)
    weight = weight.contiguous()
    arguments = _PackArgs(
        weight=weight.data_ptr(),
        in_features=weight.shape[1],
        out_features=weight.shape[0],
        num_threads=torch.get_num_threads(),
        kernel=kernel,
    )
    return _packed(arguments, SUFFIX[weight.dtype], weight.dtype)


def available_low_bit(kind: type[LowBitWeight]) -> tuple[str, ...]:
    """Like ``available``, for one kind of low-bit weights. All instruction sets give the same
    bits."""
    return tuple(_low_bit_kernels(kind))


def pack_low_bit(weight: LowBitWeight, instructions: str | None = None) -> torch.Tensor:
    """Pack a weight of 8-bit or 4-bit codes, like ``pack``.

    ``gemm`` also rounds rows to int8. Sums are then exact, so all instruction sets give the same
    bits as ``low_bit.low_bit_product``.

    Args:
        instructions: an element of ``available_low_bit``; None: the fastest.
    """
    kernels = _low_bit_kernels(type(weight))
    factors = weight.factors if isinstance(weight, Int4Weight) else None
    scales = weight.scales.float() if factors is None else weight.scales
    codes, scales = weight.codes.contiguous(), scales.contiguous()
    arguments = _PackArgs(
        weight=codes.data_ptr(),
        scales=scales.data_ptr(),
        in_features=codes.shape[1],
        out_features=codes.shape[0],
        num_threads=torch.get_num_threads(),
        kernel=chosen(kernels, instructions),
    )
    if isinstance(weight, GroupedWeight):
        zeros, order = weight.zeros.contiguous(), weight.order
        arguments.zeros, arguments.group = zeros.data_ptr(), weight.group_size
        arguments.order = None if order is None else order.data_ptr()
        arguments.bits = weight.bits
    if isinstance(weight, Int4Weight) and weight.table is not None:
        arguments.table = weight.table.data_ptr()
    if factors is not None:
        factors = factors.contiguous()
        arguments.factors = factors.data_ptr()
    return _packed(arguments, _low_bit_suffix(type(weight)), torch.uint8)


def pack_float8(weight: Float8GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Pack a float8 weight, like ``pack``, for rows of ``dtype``. Rows are not rounded.

    ``gemm`` gives the same bits as with the dequantized weight, rounded to ``dtype`` and packed for
    ``vector_instructions``.
    """
    codes, scales = weight.codes.contiguous(), weight.scales.float().contiguous()
    arguments = _PackArgs(
        weight=codes.data_ptr(),
        scales=scales.data_ptr(),
        in_features=codes.shape[1],
        out_features=codes.shape[0],
        group=weight.group_size,
        num_threads=torch.get_num_threads(),
    )
    return _packed(arguments, f"float8_{SUFFIX[dtype]}", torch.uint8)


def vector_instructions(dtype: torch.dtype) -> str:
    """Return the fastest instruction set without AMX tiles for GEMMs of ``dtype``."""
    return available(dtype)[-1]


def _low_bit_suffix(kind: type[LowBitWeight]) -> str:
    return "int8" if kind is Int8Weight else "groups"


def _low_bit_kernels(kind: type[LowBitWeight]) -> dict[str, int]:
    return kernels_by_suffix(load(), "gemm", _low_bit_suffix(kind))


def _packed(arguments: _PackArgs, suffix: str, dtype: torch.dtype) -> torch.Tensor:
    library = load()
    assert library is not None
    size = getattr(library, f"packed_bytes_{suffix}")
    size.restype = INT64
    packed = _MEMORY.empty(size(ctypes.byref(arguments)) // dtype.itemsize, dtype)
    arguments.packed = packed.data_ptr()
    getattr(library, f"pack_{suffix}")(ctypes.byref(arguments))
    return packed


def gemm(
    x: torch.Tensor,  # [M, in]
    packed: torch.Tensor,  # packed weight [out, in]
    bias: torch.Tensor | None,  # [out]
    *,
    out: torch.Tensor,  # [M, out], contiguous
    adds: bool = False,
) -> None:
    """Compute ``out = x @ weight.T + bias``. Sums are float32; with low-bit weights, integer sums
    are exact.

    A row's bits do not depend on other rows.

    Args:
        adds: true to add the product to ``out``, rounding once.
    """
    row_bytes = x.stride(0) * x.element_size()
    if x.stride(1) != 1 or (len(x) >= _MANY_ROWS and aliases_cache_sets(row_bytes)):
        x = padded_rows(len(x), x.shape[1], x).copy_(x)
    arguments = gemm_args(x, packed, bias, out=out, adds=adds)
    if getattr(load(), f"gemm_{SUFFIX[x.dtype]}")(ctypes.byref(arguments)):
        raise MemoryError("not enough memory for the converted rows of a GEMM")


def gemm_args(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    adds: bool,
) -> GemmArgs:
    """Convert the arguments of ``gemm`` to the C function's arguments."""
    return GemmArgs(
        *(x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr()),
        *(out.data_ptr(), len(x), x.stride(0), x.shape[1], out.shape[1]),
        *(torch.get_num_threads(), adds),
    )
