"""GEMM kernels of linear layers, which multiply rows by a weight.

On a CPU, there are three kinds of kernels. ``own`` is this project's C kernel
(``kernels/cpu/gemm.c``). ``onednn`` is oneDNN with packed weights, called through the operators
that torch's inductor uses for frozen weights (torch/_inductor/fx_passes/mkldnn_fusion.py).
``torch`` is ``torch.nn.functional.linear``, in which oneDNN or BLAS rearranges the weight in every
call. Because oneDNN's operators are private to torch, each kernel is first tried on a small layer,
and is not used if this trial fails.

On a CUDA device, torch multiplies, or a Triton kernel if results must be batch-invariant.
Quantized weights have their own kernels (``linear/fp8_linear.py``, ``linear/int4_linear.py``).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from batchinfer.kernels.cpu import gemm
from batchinfer.kernels.low_bit import Float8GroupedWeight, Int4Weight, Int8Weight, LowBitWeight

_PACK_FOR_ROWS = 64  # a hint for oneDNN; the packed weight works for any number of rows
_DTYPES = (torch.float32, torch.bfloat16)
_INT4_GROUP = 64
LOW_BIT_METHODS: dict[str, Callable[[torch.Tensor], LowBitWeight]] = {
    "int8": Int8Weight.rounded,
    "int4": partial(Int4Weight.rounded, group_size=_INT4_GROUP),
}
"""Functions that round a weight [out, in] to codes, keyed by the value of
``model.quantization``."""
FLOAT8_METHOD = "fp8"
ON_CPU = (*LOW_BIT_METHODS, FLOAT8_METHOD)


class PackedWeight(Protocol):
    @property
    def nbytes(self) -> int:
        """Size of the weight's tensors in bytes."""
        ...

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply rows [M, in] by the weight, and return [M, out]."""
        ...


@dataclass(frozen=True)
class LinearKernel:
    kind: str
    """own, onednn or torch, as in ``engine.cpu_kernels``."""
    instructions: str
    """The kernel's instruction set, such as AVX-512. With another instruction set, results may
    round differently."""
    is_batch_invariant: bool
    """True if the bits of a row's result do not depend on the other rows."""
    pack: Callable[[torch.Tensor], PackedWeight]
    takes: Callable[[torch.Tensor], bool] = lambda weight: True
    """Returns True if the kernel supports a weight [out, in]."""
    copies: bool = True
    """True if a packed weight is a copy, False if it shares the weight's memory."""

    @property
    def name(self) -> str:
        """The kernel's name in logs and manifests, such as ``own AVX-512``; equal names give equal
        bits."""
        return f"{self.kind} {self.instructions}"


class OwnWeight(ABC):
    """A weight for one of this project's kernels, which can also add to an existing output."""

    def __init__(self, weight: torch.Tensor, out_features: int) -> None:
        self.weight, self._out_features = weight, out_features

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = rows.new_empty(len(rows), self._out_features)
        self.multiply(rows, bias, out, adds=False)
        return out

    @abstractmethod
    def multiply(
        self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, adds: bool
    ) -> None:
        """Write the result for rows [M, in] to ``out`` [M, out]. If ``adds``, add the result to
        ``out`` instead."""


class NativeWeight(OwnWeight):
    """A weight packed by one of ``gemm``'s functions, for the C kernel."""

    def multiply(
        self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, adds: bool
    ) -> None:
        gemm.gemm(rows, self.weight, bias, out=out, adds=adds)


def _pack_native(instructions: str, weight: torch.Tensor) -> NativeWeight:
    return NativeWeight(gemm.pack(weight, instructions), len(weight))


def pack_codes(weight: LowBitWeight | Float8GroupedWeight, dtype: torch.dtype) -> NativeWeight:
    """Pack a quantized weight for the C kernel. The kernel will multiply rows of ``dtype``."""
    if isinstance(weight, Float8GroupedWeight):
        return NativeWeight(gemm.pack_float8(weight, dtype), len(weight.codes))
    return NativeWeight(gemm.pack_low_bit(weight), len(weight.codes))


class _TritonWeight(OwnWeight):
    def multiply(
        self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, adds: bool
    ) -> None:
        from batchinfer.kernels.matmul import matmul

        matmul(rows, self.weight, bias, out=out, adds=adds)


class _OneDnnWeight:
    def __init__(self, weight: torch.Tensor) -> None:
        self.nbytes = weight.nbytes
        self._packed = _ops()._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = _ops()._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return out


class _UnpackedWeight:
    def __init__(self, weight: torch.Tensor) -> None:
        self.nbytes = weight.nbytes
        self._weight = weight.clone()  # a view may keep a whole weight file mapped

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.linear(rows, self._weight, bias)


@functools.cache
def linear_kernels(dtype: torch.dtype) -> tuple[LinearKernel, ...]:
    """Return the kernels that work for weights of ``dtype`` on this processor, C kernels first.

    In oneDNN and BLAS, the order of sums may depend on the number of rows (as in oneDNN with AMX in
    bfloat16), so only the C kernels are marked as batch-invariant.
    """
    if dtype not in _DTYPES:
        return ()
    names = gemm.available(dtype) if _has_native(dtype) else ()
    capability = _capability(dtype)
    kernels = (
        *(
            LinearKernel("own", name, True, partial(_pack_native, name), gemm.supports)
            for name in names
        ),
        LinearKernel("onednn", capability, False, _OneDnnWeight),
        LinearKernel("torch", capability, False, _UnpackedWeight),
    )
    return tuple(kernel for kernel in kernels if _works(kernel, dtype))


def codes_kernel(method: str, dtype: torch.dtype) -> LinearKernel | None:
    """Return the C kernel that multiplies rows of ``dtype`` by weights of a quantization method
    (one of ``ON_CPU``), or None.

    For int8 and int4 weights, the kernel rounds rows to int8. Sums are then exact, so every
    processor gives the same bits. For float8 weights, the kernel gives the same bits as the C
    kernel without AMX tiles gives for the dequantized weight.
    """
    if not _has_native(dtype):
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
    """Return the Triton kernel for a CUDA device. The kernel's name includes the compiler and the
    target, because the bits of results depend on both."""
    import triton

    from batchinfer.kernels.launch import compute_capability

    compiled = f"Triton {triton.__version__} sm_{compute_capability(device)}"
    return LinearKernel("own", compiled, True, _pack_triton, copies=False)


def _pack_triton(weight: torch.Tensor) -> _TritonWeight:
    return _TritonWeight(weight, len(weight))


def _has_native(dtype: torch.dtype) -> bool:
    return gemm.supports(torch.empty(0, 2, dtype=dtype))


def _works(kernel: LinearKernel, dtype: torch.dtype) -> bool:
    if kernel.kind == "onednn":
        available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if not available or (dtype == torch.bfloat16 and not _ops()._is_mkldnn_bf16_supported()):
            return False
    weight = torch.linspace(-1, 1, 48 * 32, dtype=dtype).view(48, 32)
    x = torch.linspace(1, -1, 3 * 32, dtype=dtype).view(3, 32)
    try:
        output = kernel.pack(weight).times(x, None).float()
        return torch.allclose(output, x.float() @ weight.float().T, atol=5e-2, rtol=2e-2)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def _capability(dtype: torch.dtype) -> str:
    """Return the processor's instruction set, which determines which kernels oneDNN and BLAS
    run."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    if dtype == torch.bfloat16 and amx():
        return "AMX"
    return str(torch.backends.cpu.get_cpu_capability())


def _ops() -> Any:
    return torch.ops.mkldnn
