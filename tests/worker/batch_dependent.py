"""A GEMM whose last bits depend on the number of rows, as in some libraries."""

from __future__ import annotations

import torch
from torch import nn

from batchinfer.worker.linear_kernels import LinearKernel


class _BatchDependent:
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight, self.nbytes = weight.clone(), weight.nbytes

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product = nn.functional.linear(rows, self._weight, bias)
        return product * (1.0 + 2.0**-12 * (len(rows) % 3))


BATCH_DEPENDENT = LinearKernel("onednn", "slide rule", False, _BatchDependent)
