"""Weight files with quantized weights, read as if they had been saved in floating point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchinfer.worker.model.quantized.formats import Format
from batchinfer.worker.model.quantized.stored import Quantized, Stored, stored_tensors

_OF_ROWS = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub"),
    *(".output_scale", ".output_zero_point", "activation_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".prob_scale"),
)
"""Ends of the names of scales for activations or KV: both keep their dtype here."""


@dataclass(frozen=True)
class Dequantized:
    """A quantized weight that is dequantized each time it is indexed."""

    weight: Quantized
    dtype: torch.dtype
    """The dtype that it will be loaded in."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.weight.read(self.dtype)[index]


def dequantized_tensors(
    paths: Iterable[Path], saved_as: Format, dtype: torch.dtype
) -> dict[str, Stored | Dequantized]:
    """The tensors of safetensors files by the names that they have in an unquantized checkpoint.

    Reads and checks headers now, numbers when a tensor is indexed.

    Args:
        dtype: the dtype that the weights will be loaded in.

    Raises:
        ModelError: some of a weight's tensors are missing, or do not match.
    """
    weights: dict[str, dict[str, Stored]] = {}
    for tensor in (each for path in paths for each in stored_tensors(path)):
        if not tensor.name.endswith(_OF_ROWS):
            weight, end = _place(tensor.name, saved_as.ends)
            weights.setdefault(weight, {})[end] = tensor
    tensors: dict[str, Stored | Dequantized] = {}
    for name, parts in weights.items():
        quantized = saved_as.weight(name, parts)
        tensors[name] = parts[""] if quantized is None else Dequantized(quantized, dtype)
    return tensors


def empty_biases(tensors: Mapping[str, Stored | Dequantized]) -> set[str]:
    """Names of all-zero biases of dequantized layers. GPTQ tools save them for layers without a
    bias, so a model may not have them."""
    names = (
        name.removesuffix("weight") + "bias"
        for name, tensor in tensors.items()
        if isinstance(tensor, Dequantized) and len(tensor.weight.shape) == 2
    )
    return {name for name in names if name in tensors and not tensors[name][...].any()}


def _place(name: str, ends: Mapping[str, str]) -> tuple[str, str]:
    """The weight that a tensor belongs to, and the end of its name that says so."""
    end = max((end for end in ends if name.endswith(end)), key=len, default="")
    return (name.removesuffix(end) + ends[end], end) if end else (name, "")
