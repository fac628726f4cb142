"""Codes of few bits that a mixture's experts were saved with, all in one tensor or one by one.

Where a checkpoint has a tensor for each expert, transformers puts them together as it loads them:
those that go up side by side, then all experts of a layer in one tensor. Here each is found again
by its name, and taken if the numbers that were loaded are what it stands for, bit for bit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from batchinfer.worker.linear.codes import HostCodes
from batchinfer.worker.linear.experts import (
    ExpertWeights,
    expert_modules,
    keep_expert_codes,
    matrices_of,
)
from batchinfer.worker.model.quantized.stored import Quantized

_LAYER = re.compile(r"layers\.\d+\.")
_ONE_BY_ONE = re.compile(r"(layers\.\d+\.)(?:.*\.)?experts\.(\d+)\.(\w+)\.weight")
_PARTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w3",)),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Names of the weights that a matrix of an expert is made of, from its first outputs on."""

AsCodes = Callable[[Any], HostCodes | None]
"""A saved weight of few bits as a kernel takes it; None: none of those wanted does."""


def keep_prequantized_experts(
    model: nn.Module, saved: Mapping[str, Sequence[Quantized]], as_codes: AsCodes
) -> None:
    """Keep how the codes of a model's experts are read, until they are packed.

    Args:
        model: as it was loaded.
        saved: weights of the checkpoint by their names from the layers on.
        as_codes: of a weight of few bits.
    """
    one_by_one = _one_by_one(saved)
    for name, module in _named_experts(model):
        for matrix in matrices_of(module):
            for weight in saved.get(in_layers(f"{name}.{matrix.name}"), ()):
                if weight.by_expert and weight.shape == tuple(_parameter(matrix).shape):
                    read = partial(_of_one_tensor, weight, _parameter(matrix), as_codes)
                    keep_expert_codes(module, matrix.name, read)
            layer = _LAYER.match(in_layers(name))
            parts = {} if layer is None else one_by_one.get(layer[0], {})
            if parts:
                read = partial(_of_parts, parts, matrix, as_codes)
                keep_expert_codes(module, matrix.name, read)


def in_layers(name: str) -> str:
    """A tensor's name from its layers on: what stands before differs between classes."""
    return name[max(name.find("layers."), 0) :]


def _named_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    experts = {id(module) for _, _, module in expert_modules(model)}
    return ((name, module) for name, module in model.named_modules() if id(module) in experts)


def _parameter(matrix: ExpertWeights) -> torch.Tensor:
    parameter: torch.Tensor = getattr(matrix.experts, matrix.name)
    return parameter.detach()


_Parts = dict[tuple[int, str], Quantized]
"""An expert's number and what its weight is called, and how it was saved."""


def _one_by_one(saved: Mapping[str, Sequence[Quantized]]) -> dict[str, _Parts]:
    """Weights of single experts, by the start of their layer's names."""
    by_layer: defaultdict[str, _Parts] = defaultdict(dict)
    for name, weights in saved.items():
        found = _ONE_BY_ONE.fullmatch(name)
        if found is not None:
            layer, expert, part = found.groups()
            by_layer[layer][int(expert), part] = weights[0]
    return by_layer


def _of_one_tensor(
    weight: Quantized, loaded: torch.Tensor, as_codes: AsCodes, expert: int
) -> HostCodes | None:
    """The codes of one expert of a tensor, if ``loaded`` is what they stand for."""
    saved, low_bit = weight.read_expert(expert)
    codes = None if low_bit is None else as_codes(low_bit)
    return codes if torch.equal(saved.to(loaded.dtype), loaded[expert]) else None


def _of_parts(
    parts: _Parts, matrix: ExpertWeights, as_codes: AsCodes, expert: int
) -> HostCodes | None:
    """The codes of one expert's matrix, of weights that were saved apart."""
    loaded = matrix.weight[expert]
    for names in _PARTS[matrix.name]:
        weights = [parts[expert, name] for name in names if (expert, name) in parts]
        codes = _joined(weights, as_codes) if len(weights) == len(names) else None
        if codes is not None:
            saved = torch.cat([weight.read(torch.float32) for weight in weights])
            return codes if torch.equal(saved.to(loaded.dtype), loaded) else None
    return None


def _joined(weights: Sequence[Quantized], as_codes: AsCodes) -> HostCodes | None:
    """One weight of few bits whose outputs are those of ``weights``; None: they cannot be one."""
    low_bit = [weight.read_low_bit() for weight in weights]
    codes = [None if each is None else as_codes(each) for each in low_bit]
    kind: Any = type(codes[0])
    if any(type(each) is not kind or each is None for each in codes):
        return None
    if len(codes) == 1:
        return codes[0]
    try:
        joined: HostCodes = kind.joined(codes)
    except ValueError:  # of other groups, or another order
        return None
    return joined
