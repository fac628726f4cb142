"""Mixture-of-experts layers with packed weights, on a CPU.

All rows of an expert are multiplied at once, as in transformers' ``integrations/moe.py``
(``grouped_mm_experts_forward``). In transformers, BLAS rearranges the weights in every step and
supports only floating-point weights. This module packs the experts' weights only once, and supports
quantized weights. The outputs of a token's experts are summed in a fixed order in float32. With a
batch-invariant kernel, a token's bits therefore do not depend on other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from batchinfer.worker.linear.prequantized_weights import HostCodes
from batchinfer.worker.linear_kernels import LinearKernel, PackedWeight, pack_codes
from batchinfer.worker.model.quantization import is_plain_weight

_CODES = "saved_codes"


@dataclass(frozen=True)
class ExpertWeights:
    """One weight matrix for each expert of a layer."""

    experts: Any
    name: str

    @property
    def weight(self) -> torch.Tensor:
        """Return a view of the parameter as [experts, out, in]."""
        weight: torch.Tensor = getattr(self.experts, self.name).detach()
        return weight.transpose(1, 2) if self.experts.is_transposed else weight

    @property
    def joined_bias(self) -> torch.Tensor | None:
        """Biases of all experts, [experts, out], if they have biases."""
        has_bias = self.experts.has_bias
        return getattr(self.experts, f"{self.name}_bias").detach() if has_bias else None

    @property
    def biases(self) -> Sequence[torch.Tensor | None]:
        """Bias [out] of each expert, or None."""
        joined = self.joined_bias
        return [None] * len(self.weight) if joined is None else list(joined)

    def packed(
        self, kernel: LinearKernel, dtype: torch.dtype, *, as_saved: bool
    ) -> Iterator[PackedWeight]:
        """Pack each expert's matrix. If ``as_saved``, pack the codes that ``keep_expert_codes``
        kept for the matrix, if any, without rounding again."""
        read = getattr(self.experts, _CODES, {}).get(self.name) if as_saved else None
        for expert, loaded in enumerate(self.weight):
            saved: HostCodes | torch.Tensor | None = read and read(expert)
            weight = loaded if saved is None else saved
            if isinstance(weight, torch.Tensor):
                yield kernel.pack(weight)
            else:
                yield pack_codes(weight, dtype)


def keep_expert_codes(
    experts: Any, name: str, read: Callable[[int], HostCodes | torch.Tensor | None]
) -> None:
    """Keep a function that reads one expert's matrix, until the matrix is packed.

    Args:
        read: returns the saved codes; None if the loaded weight must be rounded; or, if no weight
            was loaded, a weight [out, in] to round.
    """
    setattr(experts, _CODES, {**getattr(experts, _CODES, {}), name: read})


class PackedExperts(nn.Module):
    """A layer's experts, with each matrix packed. The weights of ``experts`` are deleted after
    packing.

    Args:
        as_saved: True to pack the codes that ``keep_expert_codes`` kept, if any.
    """

    def __init__(
        self, experts: Any, kernel: LinearKernel, dtype: torch.dtype, *, as_saved: bool = False
    ) -> None:
        super().__init__()
        self.num_experts: int = experts.num_experts
        self._has_gate: bool = experts.has_gate
        self._packed: list[list[PackedWeight]] = []
        self._biases: list[Sequence[torch.Tensor | None]] = []
        self.nbytes = 0
        for matrix in matrices_of(experts):
            packed = list(matrix.packed(kernel, dtype, as_saved=as_saved))
            self.nbytes += sum(weight.nbytes for weight in packed)
            self._packed.append(packed)
            self._biases.append(matrix.biases)
            delattr(experts, matrix.name)
        if hasattr(experts, _CODES):
            delattr(experts, _CODES)  # its functions keep the loaded weights alive
        self.experts = experts
        """transformers' module without its weights, but with the activation and the biases."""

    def forward(
        self,
        hidden: torch.Tensor,  # [T, hidden]
        top_k_index: torch.Tensor,  # [T, k]
        top_k_weights: torch.Tensor,  # [T, k]
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's k experts, [T, hidden]."""
        if not len(hidden):
            return torch.empty_like(hidden)
        chosen, order = top_k_index.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
        rows = hidden.index_select(0, order // top_k_index.shape[1])
        inner = self._times(0, rows, counts)
        gated = self.experts._apply_gate(inner) if self._has_gate else self.experts.act_fn(inner)
        outs = self._times(1, gated, counts)
        outs = outs * top_k_weights.flatten()[order, None]
        by_token = torch.empty_like(outs).index_copy_(0, order, outs)
        by_token = by_token.view(*top_k_index.shape, outs.shape[1])
        total = by_token[:, 0].float()
        for place in range(1, top_k_index.shape[1]):
            total = total + by_token[:, place]
        return total.to(hidden.dtype)

    def _times(self, matrix: int, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Multiply rows, sorted by expert, by their experts' matrices. ``counts`` has each expert's
        number of rows."""
        outputs, first = [], 0
        for count, packed, bias in zip(
            *(counts, self._packed[matrix], self._biases[matrix]), strict=True
        ):
            if count:
                outputs.append(packed.times(rows[first : first + count], bias))
            first += count
        return torch.cat(outputs)


def matrices_of(experts: Any) -> tuple[ExpertWeights, ExpertWeights]:
    """Return the weights of the up projections (joined with the gates, if any) and of the down
    projections."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    return ExpertWeights(experts, up), ExpertWeights(experts, "down_proj")


def expert_modules(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the parent, name and module of each layer's experts, if transformers' expert functions
    support their structure."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if has_plain_weights(child):
                yield parent, name, child


def has_plain_weights(module: Any) -> bool:
    """Return True if a module has experts in the structure that transformers' expert functions
    support, with weights that are not quantized."""
    if not hasattr(module, "is_transposed") or getattr(module, "has_post_expert_norm", False):
        return False
    tensors = [getattr(module, matrix.name, None) for matrix in matrices_of(module)]
    return all(is_plain_weight(tensor) and tensor.dim() == 3 for tensor in tensors)


def pack_experts(
    model: nn.Module, kernel: LinearKernel, dtype: torch.dtype, *, as_saved: bool = False
) -> int:
    """Pack the experts of a model that ``kernel`` supports, one layer after another. Return the
    number of layers whose experts were packed.

    Args:
        as_saved: as in ``PackedExperts``.
    """
    count = 0
    for parent, name, experts in expert_modules(model):
        weights = [matrix.weight for matrix in matrices_of(experts)]
        if all(weight.dtype == dtype and kernel.takes(weight[0]) for weight in weights):
            setattr(parent, name, PackedExperts(experts, kernel, dtype, as_saved=as_saved))
            count += 1
    return count
