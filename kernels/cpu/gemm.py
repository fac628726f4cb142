"""Matrix products over weights packed once, in C, called through ctypes."""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.library import INT32, INT64, POINTER, SUFFIX, chosen, kernels_of, load

_MANY_ROWS = 8
_CACHE_PERIOD = 4096  # bytes after which addresses fall into the same set of the first cache
_CACHE_LINE = 64


def is_crowded(row_bytes: int) -> bool:
    """Whether rows so far apart crowd each other out of the cache when read side by side."""
    return row_bytes % _CACHE_PERIOD == 0


def rows_apart(count: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised [count, width] that is good to multiply: rows do not crowd each other."""
    more = _CACHE_LINE // like.element_size() if is_crowded(width * like.element_size()) else 0
    return like.new_empty(count, width + more)[:, :width]


class GemmArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("x", "packed", "bias", "out")),
        *((name, INT64) for name in ("num_rows", "row_stride", "in_features", "out_features")),
        *((name, INT32) for name in ("num_threads", "adds")),
    )


class _PackArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("weight", "packed")),
        *((name, INT64) for name in ("in_features", "out_features")),
        *((name, INT32) for name in ("num_threads", "kernel", "is_int8")),
    )


def supports(weight: torch.Tensor) -> bool:
    """Whether there is a compiler, and a kernel for such a weight [out, in]."""
    if load() is None or weight.dtype not in SUFFIX:
        return False
    return weight.dtype == torch.float32 or weight.shape[1] % 2 == 0  # 16 bits come in pairs


def available(dtype: torch.dtype) -> tuple[str, ...]:
    """The instructions that can compute products of ``dtype`` here, the fastest first.

    Names for people ("AMX", "AVX-512 BF16", "NEON", "plain C"); equal names give equal bits.
    """
    return tuple(kernels_of(load(), "gemm", dtype))


def instructions(dtype: torch.dtype) -> str:
    """Instructions of products of ``dtype``, unless ``pack`` is given others."""
    return available(dtype)[0]


def instructions_of(packed: torch.Tensor) -> str:
    """Instructions that a packed weight is for; "int8" for all of its kind, as their bits are the
    same."""
    number, is_int8 = packed[: 8 // packed.element_size()].view(torch.int32).tolist()
    kernels = kernels_of(load(), "gemm", packed.dtype)
    return "int8" if is_int8 else next(name for name in kernels if kernels[name] == number)


def pack(weight: torch.Tensor, instructions: str | None = None) -> torch.Tensor:
    """Pack [out, in] into a flat tensor: panels of outputs, and by what they are multiplied.

    Args:
        instructions: of those ``available``; the fastest where it is None.

    Raises:
        ValueError: ``instructions`` are not available.
    """
    kernel = chosen(kernels_of(load(), "gemm", weight.dtype), instructions)
    return _packed(weight, kernel, is_int8=False)


def pack_int8(weight: torch.Tensor, instructions: str | None = None) -> torch.Tensor:
    """Pack [out, in] rounded to int8, with a scale for each output: ``gemm`` rounds rows to int8,
    too.

    Symmetric, the largest of an output (of a row) becoming 127. Sums are exact, so that all
    instructions give the same bits; those ``available(torch.int8)`` differ in speed alone.
    """
    kernel = chosen(kernels_of(load(), "gemm", torch.int8), instructions)
    return _packed(weight, kernel, is_int8=True)


def _packed(weight: torch.Tensor, kernel: int, *, is_int8: bool) -> torch.Tensor:
    library, suffix = load(), SUFFIX[weight.dtype]
    assert library is not None
    out_features, in_features = weight.shape
    weight = weight.contiguous()
    arguments = _PackArgs(
        *(weight.data_ptr(), None, in_features, out_features),
        *(torch.get_num_threads(), kernel, is_int8),
    )
    size = getattr(library, f"packed_bytes_{suffix}")
    size.restype = INT64
    packed = weight.new_empty(size(ctypes.byref(arguments)) // weight.element_size())
    arguments.packed = packed.data_ptr()
    getattr(library, f"pack_{suffix}")(ctypes.byref(arguments))
    return packed


def gemm(
    x: torch.Tensor,  # [M, in], last dimension contiguous
    packed: torch.Tensor,  # of a weight [out, in]
    bias: torch.Tensor | None,  # [out]
    *,
    out: torch.Tensor,  # [M, out], contiguous
    adds: bool = False,
) -> None:
    """``out = x @ weight.T + bias``; float32 sums, or those of int8. A row's bits do not depend on
    the others.

    Args:
        adds: onto what ``out`` holds, rounded once.
    """
    if len(x) >= _MANY_ROWS and is_crowded(x.stride(0) * x.element_size()):
        x = rows_apart(len(x), x.shape[1], x).copy_(x)
    arguments = gemm_args(x, packed, bias, out=out, adds=adds)
    if getattr(load(), f"gemm_{SUFFIX[x.dtype]}")(ctypes.byref(arguments)):
        raise MemoryError("no memory for the rows of a product as int8")


def gemm_args(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    adds: bool,
) -> GemmArgs:
    """Arguments of the C function, from those of ``gemm``."""
    return GemmArgs(
        *(x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr()),
        *(out.data_ptr(), len(x), x.stride(0), x.shape[1], out.shape[1]),
        *(torch.get_num_threads(), adds),
    )
