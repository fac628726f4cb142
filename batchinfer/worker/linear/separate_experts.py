"""Experts of a quantized checkpoint that are saved in separate tensors.

transformers joins the experts of a layer when it loads them, in the model's dtype. All layers
together would then take several times as much memory as the quantized weights. ``LaterExperts``
therefore loads a model without most of its experts. Only the first layers, which are compared with
transformers' results, get their experts at once. All other experts are read one at a time, when
they are packed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from batchinfer.errors import ModelError
from batchinfer.worker.linear.packed_experts import ExpertWeights, expert_modules, matrices_of
from batchinfer.worker.model.quantized.stored_tensors import Quantized
from batchinfer.worker.model.shallow_copy import num_copied_layers

_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"(layers\.\d+\.)(?:.*\.)?experts\.(\d+)\.(\w+)\.weight")
_DRAFT_PREFIX = "mtp."
"""Prefix of the layers that predict later tokens. Without the prefix, the numbers of such layers
would be confused with the numbers of the model's layers."""
_PARTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w3",)),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Possible names of the weights that are concatenated to each matrix of an expert, in this
order."""


def in_layers(name: str) -> str:
    """Return a tensor's or module's name from ``layers.`` on, because the part before it differs
    between classes."""
    is_draft = name.startswith(_DRAFT_PREFIX)
    return name if is_draft else name[max(name.find("layers."), 0) :]


class SeparateExperts:
    """The saved weights of experts, keyed by ``in_layers(name)``."""

    def __init__(self, saved: Mapping[str, Sequence[Quantized]]) -> None:
        self._layers: defaultdict[str, dict[tuple[int, str], Quantized]] = defaultdict(dict)
        for name, weights in saved.items():
            if match := _EXPERT.fullmatch(name):
                layer, expert, part = match.groups()
                self._layers[layer][int(expert), part] = weights[0]

    def weights(self, module: str, matrix: ExpertWeights, expert: int) -> Sequence[Quantized]:
        """Return the saved weights that make up an expert's matrix, in the order of their outputs.
        Return an empty sequence if a weight is missing or does not have the matrix's shape.

        Args:
            module: name of the experts' module in the model.
        """
        layer = _LAYER.match(in_layers(module))
        saved = {} if layer is None else self._layers.get(layer[0], {})
        _, *shape = matrix.weight.shape
        for names in _PARTS[matrix.name]:
            weights = [saved[expert, name] for name in names if (expert, name) in saved]
            if len(weights) < len(names) or any(len(weight.shape) != 2 for weight in weights):
                continue
            height, widths = sum(each.shape[0] for each in weights), {w.shape[1] for w in weights}
            if (height, widths) == (shape[0], {shape[1]}):
                return weights
        return ()


def joined_weight(weights: Sequence[Quantized], dtype: torch.dtype) -> torch.Tensor:
    """Read and dequantize weights, and concatenate their outputs to a tensor [out, in] in
    ``dtype``."""
    return torch.cat([weight.read(torch.float32) for weight in weights]).to(dtype)


class LaterExperts:
    """The experts that are not loaded with the model, but read one at a time when they are packed.

    Args:
        model: transformers' model on the ``meta`` device.
        saved: as in ``SeparateExperts``.
    """

    def __init__(self, model: Any, saved: Mapping[str, Sequence[Quantized]]) -> None:
        self._saved = SeparateExperts(saved)
        first, names = num_copied_layers(model), _names(model)
        self._layers: set[str] = set()
        for _, _, experts in expert_modules(model):
            layer = _LAYER.match(in_layers(names[experts]))
            if layer and int(layer[1]) >= first and self._has_all(names[experts], experts):
                self._layers.add(layer[0])
        self._taken: list[tuple[nn.Module, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._layers)

    def _has_all(self, name: str, experts: Any) -> bool:
        return not experts.has_bias and all(
            self._saved.weights(name, matrix, expert)
            for matrix in matrices_of(experts)
            for expert in range(experts.num_experts)
        )

    def are_in(self, tensor: str) -> bool:
        match = _EXPERT.fullmatch(in_layers(tensor))
        return match is not None and match[1] in self._layers

    def take_out(self, model: nn.Module) -> None:
        """Replace the modules of these experts in a new model on the ``meta`` device, so that
        transformers does not load their weights."""
        names = _names(model)
        self._taken = [
            (parent, child, experts)
            for parent, child, experts in expert_modules(model)
            if (layer := _LAYER.match(in_layers(names[experts]))) and layer[0] in self._layers
        ]
        for parent, child, _ in self._taken:
            setattr(parent, child, nn.Module())

    def put_back(self) -> None:
        """Put the experts' modules back. Before they are packed, their weights are ``meta``
        tensors, and their outputs are 0."""
        for parent, child, experts in self._taken:
            experts.forward = _no_output
            setattr(parent, child, experts.eval().requires_grad_(False))
        self._taken = []

    def names_fit(self, model: nn.Module) -> bool:
        """Return True if the first expert of a loaded layer has the weights that
        ``SeparateExperts`` would put together."""
        names = _names(model)
        for _, _, experts in expert_modules(model):
            matrices = matrices_of(experts)
            if not any(matrix.weight.is_meta for matrix in matrices):
                return all(self._equals(names[experts], matrix) for matrix in matrices)
        return False

    def _equals(self, name: str, matrix: ExpertWeights) -> bool:
        weights, loaded = self._saved.weights(name, matrix, 0), matrix.weight[0]
        return bool(weights) and torch.equal(joined_weight(weights, loaded.dtype), loaded)


def check_packed(model: nn.Module) -> None:
    """Raise ModelError if some experts were neither loaded nor packed, because the kernel does not
    support them."""
    names = _names(model)
    for _, _, experts in expert_modules(model):
        if any(matrix.weight.is_meta for matrix in matrices_of(experts)):
            shape = " x ".join(map(str, matrices_of(experts)[0].weight.shape))
            raise ModelError(
                f"model.quantization: the weights of {names[experts]}, {shape}, cannot be "
                "quantized by this method",
                hint="remove the key, or choose another method",
            )


def _no_output(hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(hidden)


def _names(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}
