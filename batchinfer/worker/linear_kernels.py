"""GEMM kernels of linear layers: ways to multiply rows by a weight.

On a CPU ``own`` is the project's C kernel (``kernels/cpu/gemm.c``), ``onednn`` is oneDNN over
weights that it has packed, by the operators that torch's inductor uses when it freezes weights
(torch/_inductor/fx_passes/mkldnn_fusion.py), and ``torch`` is ``torch.nn.functional.linear``, in
which oneDNN or BLAS rearranges the weight in every call. oneDNN's operators are private to torch,
so each kernel is tried on a small layer first and left out if it does not work.

On a CUDA device torch multiplies, or the project's Triton kernel if it must be batch-invariant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from batchinfer.kernels.cpu import gemm
from batchinfer.kernels.low_bit import Float8GroupedWeight, Int4Weight, Int8Weight, LowBitWeight

_PACK_FOR_ROWS = 64  # a hint; the packed weight serves any number of rows
_DTYPES = (torch.float32, torch.bfloat16)
_INT4_GROUP = 64
LOW_BIT_METHODS: dict[str, Callable[[torch.Tensor], LowBitWeight]] = {
    "int8": Int8Weight.rounded,
    "int4": partial(Int4Weight.rounded, group_size=_INT4_GROUP),
}
"""Functions that round a weight [out, in], by value of ``model.quantization``."""
FLOAT8_METHOD = "fp8"
ON_CPU = (*LOW_BIT_METHODS, FLOAT8_METHOD)
"""Values of ``model.quantization`` that the project's own kernels for a CPU compute."""


class Packed(Protocol):
    """A weight [out, in] packed for a kernel."""

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply rows [M, in]: [M, out]."""
        ...


@dataclass(frozen=True)
class LinearKernel:
    """A way to multiply by a weight."""

    kind: str
    """A value of ``engine.cpu_kernels``: own, onednn or torch."""
    instructions: str
    """The instructions it is written for, such as AVX-512; others may round differently."""
    is_batch_invariant: bool
    """Whether a row's bits do not depend on the other rows of the product."""
    pack: Callable[[torch.Tensor], Packed]
    takes: Callable[[torch.Tensor], bool] = lambda weight: True
    """Whether it supports a weight [out, in] of its dtype."""
    copies: bool = True
    """Whether a packed weight is a copy, not the weight itself."""

    @property
    def name(self) -> str:
        """The name for users and records, such as ``own AVX-512``; equal names give equal bits."""
        return f"{self.kind} {self.instructions}"


class OwnPacked:
    """A weight packed for the project's C kernel.

    Args:
        packed: from ``gemm``'s pack functions.
    """

    def __init__(self, packed: torch.Tensor, out_features: int) -> None:
        self.weight, self._out_features = packed, out_features

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = rows.new_empty(len(rows), self._out_features)
        gemm.gemm(rows, self.weight, bias, out=out)
        return out

    def add_times(self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        gemm.gemm(rows, self.weight, bias, out=out, adds=True)


def _pack_own(instructions: str, weight: torch.Tensor) -> OwnPacked:
    return OwnPacked(gemm.pack(weight, instructions), len(weight))


def pack_codes(weight: LowBitWeight | Float8GroupedWeight, dtype: torch.dtype) -> OwnPacked:
    """Pack a quantized weight for the project's C kernel, for rows of ``dtype``."""
    if isinstance(weight, Float8GroupedWeight):
        return OwnPacked(gemm.pack_float8(weight, dtype), len(weight.codes))
    return OwnPacked(gemm.pack_low_bit(weight), len(weight.codes))


class TritonWeight:
    """An unchanged weight on a CUDA device, for the project's Triton kernel."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = rows.new_empty(len(rows), len(self._weight))
        self._multiply(rows, bias, out, adds=False)
        return out

    def add_times(self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        self._multiply(rows, bias, out, adds=True)

    def _multiply(
        self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, adds: bool
    ) -> None:
        from batchinfer.kernels.matmul import matmul

        matmul(rows, self._weight, bias, out=out, adds=adds)


class _OneDnnPacked:
    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = _ops()._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = _ops()._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return out


class _Unpacked:
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.clone()  # a view may keep a whole file of weights mapped

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.linear(rows, self._weight, bias)


@functools.cache
def linear_kernels(dtype: torch.dtype) -> tuple[LinearKernel, ...]:
    """The kernels that work for weights of ``dtype`` on this processor; own ones first.

    oneDNN and BLAS may sum in an order that depends on the number of rows (oneDNN with AMX does in
    bfloat16), so only the project's own kernels claim to be batch-invariant.
    """
    if dtype not in _DTYPES:
        return ()
    names = gemm.available(dtype) if _has_own(dtype) else ()
    capability = _capability(dtype)
    kernels = (
        *(
            LinearKernel("own", name, True, partial(_pack_own, name), gemm.supports)
            for name in names
        ),
        LinearKernel("onednn", capability, False, _OneDnnPacked),
        LinearKernel("torch", capability, False, _Unpacked),
    )
    return tuple(kernel for kernel in kernels if _works(kernel, dtype))


def codes_kernel(method: str, dtype: torch.dtype) -> LinearKernel | None:
    """The kernel that multiplies rows of ``dtype`` by quantized weights; None: there is none here.

    Rows are rounded to int8 for weights of int8 and int4; sums are exact then, so every processor
    gives the same bits. float8 weights give the bits of the dequantized weight, multiplied by the
    project's own kernel without tiles.

    Args:
        method: one of ``ON_CPU``.
    """
    if not _has_own(dtype):
        return None
    if method == FLOAT8_METHOD:
        return LinearKernel(
            "own",
            f"float8, {gemm.vector_instructions(dtype)}",
            True,
            lambda weight: pack_codes(Float8GroupedWeight.rounded(weight), dtype),
            gemm.supports,
        )
    rounded = LOW_BIT_METHODS[method]
    return LinearKernel("own", method, True, lambda weight: pack_codes(rounded(weight), dtype))


def triton_kernel(device: torch.device) -> LinearKernel:
    """The project's kernel for a CUDA device; its compiler and target decide the bits."""
    import triton

    from batchinfer.kernels.launch import compute_capability

    compiled = f"Triton {triton.__version__} sm_{compute_capability(device)}"
    return LinearKernel("own", compiled, True, TritonWeight, copies=False)


def _has_own(dtype: torch.dtype) -> bool:
    return gemm.supports(torch.empty(0, 2, dtype=dtype))


def _works(kernel: LinearKernel, dtype: torch.dtype) -> bool:
    if kernel.kind == "onednn" and not _one_dnn_takes(dtype):
        return False
    weight = torch.linspace(-1, 1, 48 * 32, dtype=dtype).view(48, 32)
    x = torch.linspace(1, -1, 3 * 32, dtype=dtype).view(3, 32)
    try:
        product = kernel.pack(weight).times(x, None).float()
        return torch.allclose(product, x.float() @ weight.float().T, atol=5e-2, rtol=2e-2)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def _one_dnn_takes(dtype: torch.dtype) -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and (dtype != torch.bfloat16 or _ops()._is_mkldnn_bf16_supported()))


def _capability(dtype: torch.dtype) -> str:
    """The instruction set by which oneDNN and BLAS choose a kernel."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    if dtype == torch.bfloat16 and amx():
        return "AMX"
    return str(torch.backends.cpu.get_cpu_capability())


def _ops() -> Any:
    return torch.ops.mkldnn
