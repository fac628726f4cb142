"""Activations on a CPU whose bits do not depend on the other rows of a step.

torch computes most elements with vector instructions, but the last few elements of each thread's
share with other instructions, which may round differently. Which elements come last depends on the
numbers of rows and threads.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import (
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
    QuickGELUActivation,
    SiLUActivation,
)

from batchinfer.kernels.cpu.encoder_layers import activate, supports

_NAMES: dict[type[nn.Module], str] = {
    GELUActivation: "gelu",
    GELUTanh: "gelu_tanh",
    NewGELUActivation: "gelu_tanh",
    QuickGELUActivation: "quick_gelu",
    SiLUActivation: "silu",
    nn.SiLU: "silu",
}


class NativeActivation(nn.Module):
    """Computes an activation in C."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        activate(out, self._name)
        return out


def replace_activations(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace a model's activation modules on a CPU; keep them if there is no C compiler."""
    if not supports(dtype):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (activation := _name_of(child)) is not None:
                setattr(parent, name, NativeActivation(activation))


def _name_of(module: nn.Module) -> str | None:
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _NAMES.get(type(module))
