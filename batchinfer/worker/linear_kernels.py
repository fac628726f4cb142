"""The kernels that can multiply rows by a linear layer's weight.

On a CPU ``own`` is the project's C kernel (``kernels/cpu/gemm.c``), ``onednn`` oneDNN over weights
it has packed, by the operators that torch's inductor uses when it freezes weights
(torch/_inductor/fx_passes/mkldnn_fusion.py), ``torch`` is ``torch.nn.functional.linear``, which has
oneDNN or BLAS rearrange the weight in every call. Those of oneDNN are private to torch, so each
kernel is tried on a small layer first and left out where it does not work.

On a CUDA device torch multiplies, or the project's Triton kernel where a row's bits are to be kept.
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
from batchinfer.kernels.float8_rows import Float8Rows
from batchinfer.kernels.low_bit import Int4Weight, Int8Weight, LowBitWeight

_PACK_FOR_ROWS = 64  # a hint; the packed weight serves any number of rows
_DTYPES = (torch.float32, torch.bfloat16)
_TRIED_WIDTH, _TRIED_OUTPUTS = 32, 48
_INT4_GROUP = 64
LOW_BIT_METHODS: dict[str, Callable[[torch.Tensor], LowBitWeight]] = {
    "int8": Int8Weight.rounded,
    "int4": partial(Int4Weight.rounded, group_size=_INT4_GROUP),
}
"""How values of ``model.quantization`` round a weight [out, in]."""
FLOAT8_METHOD = "fp8"
ON_CPU = (*LOW_BIT_METHODS, FLOAT8_METHOD)
"""Values of ``model.quantization`` that the project's own kernels for a CPU do."""


class Packed(Protocol):
    """A weight [out, in] packed for a kernel."""

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Product of rows [M, in]: [M, out]."""
        ...


@dataclass(frozen=True)
class LinearKernel:
    """A way to multiply by a weight."""

    kind: str
    """A value of ``engine.cpu_kernels``: own, onednn or torch."""
    instructions: str
    """What it is written for, such as AVX-512; another one may round in another way."""
    is_batch_invariant: bool
    """Whether a row's result is the same, bit for bit, whatever rows stand beside it."""
    pack: Callable[[torch.Tensor], Packed]
    takes: Callable[[torch.Tensor], bool] = lambda weight: True
    """Whether it multiplies by a weight [out, in] of this dtype."""
    copies: bool = True
    """Whether a packed weight is a copy; else it is the weight that was given."""

    @property
    def name(self) -> str:
        """The name for people and records, such as ``own AVX-512``; it tells bits apart."""
        return f"{self.kind} {self.instructions}"


class OwnPacked:
    """A weight packed for the project's C kernel.

    Args:
        packed: as ``gemm`` packs one.
    """

    def __init__(self, packed: torch.Tensor, out_features: int) -> None:
        self.weight, self._out_features = packed, out_features

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = rows.new_empty(len(rows), self._out_features)
        gemm.gemm(rows, self.weight, bias, out=out)
        return out

    def add_times(self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        gemm.gemm(rows, self.weight, bias, out=out, adds=True)


def pack_own(weight: torch.Tensor | LowBitWeight, instructions: str | None = None) -> OwnPacked:
    """Pack a weight [out, in] for the project's C kernel.

    Args:
        instructions: as ``gemm.pack`` takes them.
    """
    if isinstance(weight, torch.Tensor):
        return OwnPacked(gemm.pack(weight, instructions), len(weight))
    return OwnPacked(gemm.pack_low_bit(weight, instructions), len(weight.codes))


def pack_codes(weight: LowBitWeight | Float8Rows, dtype: torch.dtype) -> OwnPacked:
    """Pack a weight of codes for the project's C kernel, for rows of ``dtype``."""
    if isinstance(weight, Float8Rows):
        return OwnPacked(gemm.pack_float8(weight, dtype), len(weight.codes))
    return pack_own(weight)


class TritonWeight:
    """A weight on a CUDA device for the project's Triton kernel, as it is."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from batchinfer.kernels.matmul import matmul

        out = rows.new_empty(len(rows), len(self._weight))
        matmul(rows, self._weight, bias, out=out)
        return out

    def add_times(self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        from batchinfer.kernels.matmul import matmul

        matmul(rows, self._weight, bias, out=out, adds=True)


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
    """The kernels that multiply weights of ``dtype`` on this processor, and right; own ones first.

    oneDNN and BLAS may sum in an order that depends on the number of rows (oneDNN with AMX does in
    bfloat16), so that only the project's own claim to keep a row's bits.
    """
    if dtype not in _DTYPES:
        return ()
    own = [
        LinearKernel(
            "own",
            name,
            True,
            partial(pack_own, instructions=name),
            gemm.supports,
        )
        for name in (gemm.available(dtype) if gemm.supports(torch.empty(0, 2, dtype=dtype)) else ())
    ]
    capability = _capability(dtype)
    others = (
        LinearKernel("onednn", capability, False, _OneDnnPacked),
        LinearKernel("torch", capability, False, _Unpacked),
    )
    return tuple(kernel for kernel in (*own, *others) if _works(kernel, dtype))


def low_bit_kernel(name: str, dtype: torch.dtype) -> LinearKernel | None:
    """The kernel that multiplies rows of ``dtype``, rounded to int8, by weights of few bits; None:
    there is none here.

    Sums are exact, so that it gives the same bits on every processor.

    Args:
        name: a key of ``LOW_BIT_METHODS``.
    """
    if not gemm.supports(torch.empty(0, 2, dtype=dtype)):
        return None
    rounded = LOW_BIT_METHODS[name]
    return LinearKernel("own", name, True, lambda weight: pack_own(rounded(weight)))


def float8_kernel(dtype: torch.dtype) -> LinearKernel | None:
    """The kernel that multiplies rows of ``dtype`` by weights of float8; None: there is none here.

    It gives the bits of the project's own kernel without tiles for the numbers that codes stand
    for.
    """
    if not gemm.supports(torch.empty(0, 2, dtype=dtype)):
        return None
    return LinearKernel(
        "own",
        f"float8, {gemm.vector_instructions(dtype)}",
        True,
        lambda weight: pack_codes(Float8Rows.rounded(weight), weight.dtype),
        gemm.supports,
    )


def codes_kernel(name: str, dtype: torch.dtype) -> LinearKernel | None:
    """``low_bit_kernel`` or ``float8_kernel``, by a value of ``model.quantization``."""
    return float8_kernel(dtype) if name == FLOAT8_METHOD else low_bit_kernel(name, dtype)


def triton_kernel(device: torch.device) -> LinearKernel:
    """The project's kernel for a CUDA device; what compiles it and for what decides the bits."""
    import triton

    from batchinfer.kernels.launch import compute_capability

    compiled = f"Triton {triton.__version__} sm_{compute_capability(device)}"
    return LinearKernel("own", compiled, True, TritonWeight, copies=False)


def _works(kernel: LinearKernel, dtype: torch.dtype) -> bool:
    if kernel.kind == "onednn" and not _one_dnn_takes(dtype):
        return False
    weight = torch.linspace(-1, 1, _TRIED_OUTPUTS * _TRIED_WIDTH, dtype=dtype)
    weight = weight.view(_TRIED_OUTPUTS, _TRIED_WIDTH)
    x = torch.linspace(1, -1, 3 * _TRIED_WIDTH, dtype=dtype).view(3, _TRIED_WIDTH)
    try:
        product = kernel.pack(weight).times(x, None).float()
        return torch.allclose(product, x.float() @ weight.float().T, atol=5e-2, rtol=2e-2)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def _one_dnn_takes(dtype: torch.dtype) -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and (dtype != torch.bfloat16 or _ops()._is_mkldnn_bf16_supported()))


def _capability(dtype: torch.dtype) -> str:
    """The instructions that oneDNN and BLAS choose by."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    if dtype == torch.bfloat16 and amx():
        return "AMX"
    return str(torch.backends.cpu.get_cpu_capability())


def _ops() -> Any:
    return torch.ops.mkldnn
