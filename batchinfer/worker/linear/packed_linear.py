"""Linear layers whose weights are packed once, the way they will be read.

``torch.nn.functional.linear`` has oneDNN or BLAS rearrange the weight in every call. The project's
own kernel is up to 1.7 times oneDNN's packed speed at 8 to 32 rows and as fast at 64 on a processor
with AVX-512, and oneDNN's packed product 1.3 to 2.4 times ``linear``; which is best elsewhere is
measured (``choice``). On a CUDA device a weight stays as it is; only what multiplies is another.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from batchinfer.worker.linear.codes import join_codes
from batchinfer.worker.linear_kernels import LinearKernel, OwnPacked
from batchinfer.worker.model.quantization import is_plain


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` over a packed weight.

    Args:
        linear: a layer that ``kernel`` takes.
        kernel: what multiplies. Where it keeps a row's bits, a row of the result does not depend
            on the other rows of ``x``, bit for bit.
        packed: the layer's weight as ``kernel`` takes it; None: it is packed here.
    """

    def __init__(
        self, linear: nn.Linear, kernel: LinearKernel, packed: OwnPacked | None = None
    ) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        # For model code that asks for shape and dtype; where it is packed it holds no memory.
        self.weight = torch.empty_like(weight, device="meta") if kernel.copies else linear.weight
        self.kernel = kernel
        self._packed = packed or kernel.pack(weight)
        own = self.own
        self.is_low_bit = own is not None and own.weight.dtype != weight.dtype
        """Whether it multiplies by codes, and rounds rows to int8 for that if they are integers."""
        self.nbytes = 0
        """Of what is packed, besides parameters."""
        if kernel.copies:
            self.nbytes = own.weight.nbytes if own and self.is_low_bit else weight.nbytes

    @property
    def own(self) -> OwnPacked | None:
        """The packed weight, where the project's own kernel multiplies by it."""
        return self._packed if isinstance(self._packed, OwnPacked) else None

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add the product of x [T, in_features] to the residual [T, out_features]."""
        packed: Any = self._packed
        if self.kernel.kind == "own":
            packed.add_times(x, self.bias, residual)
        else:
            residual += packed.times(x, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.in_features)
        out = self._packed.times(rows, self.bias)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)


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
    join_codes(one, linears)
    return one


def pack_linears(
    model: nn.Module, kernel: LinearKernel, dtype: torch.dtype, but: nn.Module | None = None
) -> int:
    """Replace those linear layers of a model that ``kernel`` takes, one at a time.

    Args:
        but: a layer that stays.

    Returns:
        How many were replaced.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is not but and packs(child, kernel, dtype):
                setattr(parent, name, PackedLinear(child, kernel))
                count += 1
    return count


def packs(linear: object, kernel: LinearKernel, dtype: torch.dtype) -> TypeGuard[nn.Linear]:
    """Whether ``kernel``, of weights of ``dtype``, multiplies by a layer's weight."""
    return (
        is_plain(linear)
        and linear.weight.dtype == dtype
        and linear.weight.numel() > 0
        and kernel.takes(linear.weight)
    )
