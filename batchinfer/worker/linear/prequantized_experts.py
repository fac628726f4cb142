"""Finds the saved codes of a mixture's experts, saved in one tensor or in one for each expert.

If a checkpoint has a tensor for each expert, transformers joins them on loading: first the matrices
of one expert that share an input, then all experts of a layer. Here each is found by its name, and
used if it dequantizes to the loaded numbers, bit for bit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from batchinfer.worker.linear.codes import HostCodes, joined_codes
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
"""Names of the weights that an expert's matrix is made of, in order of its outputs."""

AsCodes = Callable[[Any], HostCodes | None]
"""Converts a saved weight to codes for a kernel; None: they have no wanted kind."""
_Parts = dict[tuple[int, str], Quantized]
"""Saved weights, by the expert's number and the weight's name."""


def keep_prequantized_experts(
    model: nn.Module, saved: Mapping[str, Sequence[Quantized]], as_codes: AsCodes
) -> None:
    """Keep functions that read the codes of a model's experts, until these are packed.

    Args:
        model: as it was loaded.
        saved: weights of the checkpoint by ``in_layers`` of their names.
    """
    one_by_one: defaultdict[str, _Parts] = defaultdict(dict)
    for name, weights in saved.items():
        if found := _ONE_BY_ONE.fullmatch(name):
            layer, expert, part = found.groups()
            one_by_one[layer][int(expert), part] = weights[0]
    experts = {module for _, _, module in expert_modules(model)}
    for name, module in model.named_modules():
        for matrix in matrices_of(module) if module in experts else ():
            parameter = getattr(module, matrix.name).detach()
            for weight in saved.get(in_layers(f"{name}.{matrix.name}"), ()):
                if weight.by_expert and weight.shape == tuple(parameter.shape):
                    read = partial(_from_one_tensor, weight, parameter, as_codes)
                    keep_expert_codes(module, matrix.name, read)
            in_layer = _LAYER.match(in_layers(name))
            if in_layer and in_layer[0] in one_by_one:
                read = partial(_from_parts, one_by_one[in_layer[0]], matrix, as_codes)
                keep_expert_codes(module, matrix.name, read)


def in_layers(name: str) -> str:
    """A tensor's name from ``layers`` on, as the part before differs between classes."""
    return name[max(name.find("layers."), 0) :]


def _from_one_tensor(
    weight: Quantized, loaded: torch.Tensor, as_codes: AsCodes, expert: int
) -> HostCodes | None:
    """The codes of one expert in a tensor of all experts, if they dequantize to ``loaded``."""
    saved, low_bit = weight.read_expert(expert)
    codes = None if low_bit is None else as_codes(low_bit)
    return codes if torch.equal(saved.to(loaded.dtype), loaded[expert]) else None


def _from_parts(
    parts: _Parts, matrix: ExpertWeights, as_codes: AsCodes, expert: int
) -> HostCodes | None:
    """The codes of one expert's matrix, joined from weights that were saved separately."""
    loaded = matrix.weight[expert]
    for names in _PARTS[matrix.name]:
        if any((expert, name) not in parts for name in names):
            continue
        weights = [parts[expert, name] for name in names]
        low_bit = [weight.read_low_bit() for weight in weights]
        codes: HostCodes | None = joined_codes(
            [None if each is None else as_codes(each) for each in low_bit]
        )
        if codes is not None:
            saved = torch.cat([weight.read(torch.float32) for weight in weights])
            return codes if torch.equal(saved.to(loaded.dtype), loaded) else None
    return None
