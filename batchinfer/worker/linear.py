"""Linear layers for the CPU whose weights are packed once, the way they will be read.

``torch.nn.functional.linear`` has oneDNN or BLAS rearrange the weight in every call. With AVX-512
the project's own kernel (``kernels/cpu/gemm.c``) multiplies: up to 1.7 times oneDNN's packed speed
at 8 to 32 rows, as fast at 64. Elsewhere oneDNN does, by the operators that torch's inductor uses
when it freezes weights (torch/_inductor/fx_passes/mkldnn_fusion.py): 1.3 to 2.4 times ``linear``.
These are private to torch, so they are tried on a small layer first and left alone where they do
not work.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import nn

from batchinfer.kernels.cpu import gemm
from batchinfer.worker.quantization import is_plain

_PACK_FOR_ROWS = 64  # a hint; the packed weight serves any number of rows
_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` over a packed weight.

    A row of the result does not depend on the other rows of ``x``, bit for bit.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        # Shape and dtype for model code that asks for them; it holds no memory.
        self.weight = torch.empty_like(weight, device="meta")
        self.nbytes = weight.nbytes
        self._packed = _pack(weight)

    @property
    def own(self) -> torch.Tensor | None:
        """The packed weight, where the project's own kernel multiplies by it."""
        return self._packed.weight if isinstance(self._packed, _OwnPacked) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.in_features)
        out = self._packed.times(rows, self.bias)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)


class _Packed(Protocol):
    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[M, in_features] to [M, out_features]."""
        ...


class _OwnPacked:
    """By the project's C kernel, where the processor has the vectors it is written for."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._out_features = len(weight)
        self.weight = gemm.pack(weight)

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = rows.new_empty(len(rows), self._out_features)
        gemm.gemm(rows, self.weight, bias, out=out)
        return out


class _OneDnnPacked:
    """By oneDNN. A single row is computed twice: alone it would take a matrix-vector product."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = _ops()._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        count = len(rows)
        if count == 1:
            rows = rows.repeat(2, 1)
        out: torch.Tensor = _ops()._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return out[:count]


def _pack(weight: torch.Tensor) -> _Packed:
    return _OwnPacked(weight) if gemm.supports(weight) else _OneDnnPacked(weight)


def merged(*linears: nn.Linear) -> nn.Linear:
    """One layer whose outputs are those of ``linears``, which take the same input, side by side."""
    first = linears[0]
    widths = [linear.out_features for linear in linears]
    one = nn.Linear(first.in_features, sum(widths), bias=False, device="meta")
    weights = torch.cat([linear.weight.detach() for linear in linears])
    one.weight = nn.Parameter(weights, requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        biases = [
            linear.weight.new_zeros(width) if linear.bias is None else linear.bias.detach()
            for linear, width in zip(linears, widths, strict=True)
        ]
        one.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return one


def pack_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the linear layers of a model on the CPU, one at a time, where packing works."""
    if not packing_works(dtype):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child) and child.weight.dtype == dtype and child.weight.numel():
                setattr(parent, name, PackedLinear(child))


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies by packed weights of ``dtype``, and right."""
    if dtype not in _DTYPES:
        return False
    linear = nn.Linear(32, 48, dtype=dtype).requires_grad_(False)
    x = torch.linspace(-1, 1, 96, dtype=dtype).view(3, 32)
    try:
        if not gemm.supports(linear.weight) and not _one_dnn_works(dtype):
            return False
        return torch.allclose(PackedLinear(linear)(x), linear(x), atol=2e-2, rtol=2e-2)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def _one_dnn_works(dtype: torch.dtype) -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and (dtype != torch.bfloat16 or _ops()._is_mkldnn_bf16_supported()))


def _ops() -> Any:
    return torch.ops.mkldnn
