"""Swaps a loaded model's attention, MLPs and norms for fused ones, where they compute the same.

A module is known by its parts and then by what it does. The model runs once on four tokens, from
the first position to the last it may have. Each module that looks right is then copied to float32,
where only what it computes can tell it from the fused one and no rounding can hide that, and both
run on what the module was given: as it is, much smaller, and so much larger that a clip or clamp
shows. What disagrees in any element is left as it is, so that a family nobody has thought of runs
the way transformers has it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.fusion.compare import Call, ModuleComparison, rows_agree
from batchinfer.worker.fusion.layers import fuse_layers
from batchinfer.worker.fusion.modules import FusedAttention, FusedGatedMLP, FusedRMSNorm
from batchinfer.worker.model.quantization import is_plain

_NORM_OFFSETS = (0.0, 1.0)  # Gemma's norms multiply by 1 + weight
_SCALES = (2.0**-8, 1.0, 2.0**8, 2.0**16)
# The logits of the whole model in its own dtype: the originals round to 16 bits more often.
_LOGITS_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}

_Recipe = Callable[[Any, Call], nn.Module]
"""Makes a fused module from one of transformers' and how that was called."""


def fuse(model: nn.Module, layout: KVLayout, max_model_len: int) -> bool:
    """Swap a model's modules for fused ones, one after the other.

    Args:
        layout: of a pool for this model.
        max_model_len: the model is tried up to its last position.

    Returns:
        Whether the model's logits are what they were. If not, the model is to be loaded again.
    """
    weight = next(model.parameters())
    comparison = ModuleComparison(model, layout, max_model_len)
    with torch.inference_mode():
        logits_before = comparison.run(lambda module: bool(_recipes(module)))
        _fuse_children(model, "", comparison)
        if weight.is_cuda:
            fuse_layers(model, layout)
        logits_after = comparison.run(lambda module: False)
        return rows_agree(logits_after, logits_before, _LOGITS_TOLERANCE[weight.dtype])


def _fuse_children(parent: nn.Module, prefix: str, comparison: ModuleComparison) -> None:
    """Swap modules from the outside in: what is swapped whole takes its parts along."""
    for name, child in list(parent.named_children()):
        full_name = f"{prefix}.{name}" if prefix else name
        call = comparison.calls.get(full_name)
        fused = None if call is None else _fused(child, call, comparison)
        if fused is None:
            _fuse_children(child, full_name, comparison)
        else:
            setattr(parent, name, fused)


def _fused(module: nn.Module, call: Call, comparison: ModuleComparison) -> nn.Module | None:
    """A fused module that computes what ``module`` does, if there is one."""
    dtypes = {tensor.dtype for tensor in (*module.parameters(), *call.float_tensors())}
    if len(dtypes) > 1:
        return None  # part of it is kept in another precision
    in_float32 = copy.deepcopy(module).float()
    for recipe in _recipes(module):
        try:
            candidate = recipe(in_float32, call)
            same = all(comparison.agree(candidate, in_float32, call, scale) for scale in _SCALES)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # it is made, or called, in another way than what was fused
            continue
        if same:
            return recipe(module, call)
    return None


def _recipes(module: Any) -> list[_Recipe]:
    """Recipes for fused modules in the place of a module with such parts."""
    if _is_attention(module):
        offsets = _NORM_OFFSETS if hasattr(module, "q_norm") else _NORM_OFFSETS[:1]
        return [partial(_attention, offset) for offset in offsets]
    if _is_gated_mlp(module):
        return [lambda mlp, call: FusedGatedMLP(mlp)]
    if _is_norm(module):
        return [partial(_norm, offset) for offset in _NORM_OFFSETS]
    return []


def _attention(offset: float, attention: Any, call: Call) -> nn.Module:
    if call.variant is None:
        raise ValueError("it asked for no attention")
    return FusedAttention(attention, call.variant, offset)


def _norm(offset: float, norm: Any, call: Call) -> nn.Module:
    return FusedRMSNorm(norm, offset)


def _is_attention(module: Any) -> bool:
    parts = {name for name, _ in module.named_children()}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if parts not in (projections, projections | {"q_norm", "k_norm"}):
        return False
    norms_fit = "q_norm" not in parts or all(
        _is_norm(norm) and len(norm.weight) == module.head_dim
        for norm in (module.q_norm, module.k_norm)
    )
    return norms_fit and all(is_plain(getattr(module, name)) for name in projections)


def _is_gated_mlp(module: Any) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    parts = {name for name, _ in module.named_children()}
    return parts in ({*names}, {*names, "act_fn"}) and all(
        is_plain(getattr(module, name)) for name in names
    )


def _is_norm(module: Any) -> bool:
    weights = dict(module.named_parameters())
    has_eps = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    return type(module).__name__.endswith("RMSNorm") and [*weights] == ["weight"] and has_eps
