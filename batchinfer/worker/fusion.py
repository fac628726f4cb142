"""Swaps a loaded model's attention, MLPs and norms for fused ones, where they compute the same.

A module is known by its parts, and then by what it does: the model runs on four tokens, from the
first position to the last it may have, and a fused module has to give what the one it replaces
gave. Whatever does not is left as it is, so that a family nobody has thought of runs the way
transformers has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from batchinfer.engine.layout import KVLayout
from batchinfer.engine.step import Step
from batchinfer.worker.attention import (
    AttentionBackend,
    ForwardContext,
    forward_context,
    make_backend,
)
from batchinfer.worker.forward import forward
from batchinfer.worker.fused_modules import FusedAttention, FusedGatedMLP, FusedRMSNorm
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.probe_step import probe_step
from batchinfer.worker.variant import AttentionVariant

_TOKENS = (3, 7, 5, 3)
_NORM_OFFSETS = (0.0, 1.0)  # Gemma's norms multiply by 1 + weight
# Largest difference over the largest value: the originals round to 16 bits more often.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def fuse(model: nn.Module, layout: KVLayout, max_model_len: int) -> int:
    """Swap what can be swapped, one module after the other.

    Args:
        layout: of a pool for this model.
        max_model_len: the model is tried up to its last position.

    Returns:
        The number of modules swapped.
    """
    weight = next(model.parameters())
    positions = (0, 1, max_model_len // 2, max_model_len - 1)
    step = probe_step(_TOKENS, 1, layout, positions)
    cache = KVCache(layout, step.block_tables.size, weight.device, weight.dtype)
    watcher = _Watcher(cache, make_backend(cache))
    calls = _calls(model, watcher, step)
    with torch.inference_mode():
        return _fuse_children(model, "", calls, watcher)


class _Effect(NamedTuple):
    """What a module gave; of an attention module also the query, keys and values it came to."""

    tensors: tuple[torch.Tensor, ...]
    variant: AttentionVariant | None

    def agrees(self, other: _Effect) -> bool:
        return len(self.tensors) == len(other.tensors) and all(
            map(_close, self.tensors, other.tensors)
        )


class _Call(NamedTuple):
    """How a module was called, and what that came to."""

    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    effect: _Effect


class _Watcher:
    """A backend that notes what it is asked; the calls of one forward pass, again and again."""

    def __init__(self, cache: KVCache, backend: AttentionBackend) -> None:
        self.cache, self._backend = cache, backend
        self._attended: tuple[int, torch.Tensor, AttentionVariant] | None = None

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        self._context = ForwardContext(self.cache, self, tensors["slot_mapping"])
        self._backend.begin_step(step, tensors)

    def attend(self, layer: int, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
        self._attended = (layer, query.clone(), variant)
        return self._backend.attend(layer, query, variant)

    def effect(self, module: nn.Module, output: Any) -> _Effect:
        """The effect of ``module``, which has just given ``output``."""
        given = output[0] if isinstance(output, tuple) else output
        (attended, self._attended) = (self._attended, None)
        if attended is None or not hasattr(module, "layer_idx"):
            return _Effect((given,), None)
        layer, query, variant = attended
        keys, values = self.cache.key(layer), self.cache.value(layer)
        written = (cache[0, :, : len(_TOKENS)].clone() for cache in (keys, values))
        return _Effect((given, query, *written), variant)

    def again(self, module: nn.Module, call: _Call) -> _Effect:
        """The effect of ``module`` in the place of another."""
        with forward_context(self._context):
            return self.effect(module, module(*call.arguments, **call.options))


def _calls(model: nn.Module, watcher: _Watcher, step: Step) -> dict[str, _Call]:
    """Run the model once; the calls of the modules that might be swapped, by their names."""
    calls: dict[str, _Call] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def note(module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
            calls[name] = _Call(arguments, options, watcher.effect(module, output))

        return note

    hooks = [
        module.register_forward_hook(hook_for(name), with_kwargs=True)
        for name, module in model.named_modules()
        if _is_attention(module) or _is_gated_mlp(module) or _is_norm(module)
    ]
    try:
        forward(model, watcher.cache, watcher, step)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _fuse_children(
    parent: nn.Module, prefix: str, calls: Mapping[str, _Call], watcher: _Watcher
) -> int:
    """From the outside in: what is swapped whole takes its parts along."""
    count = 0
    for name, child in list(parent.named_children()):
        full_name = f"{prefix}.{name}" if prefix else name
        fused = _fused(child, calls[full_name], watcher) if full_name in calls else None
        if fused is None:
            count += _fuse_children(child, full_name, calls, watcher)
        else:
            setattr(parent, name, fused)
            count += 1
    return count


def _fused(module: nn.Module, call: _Call, watcher: _Watcher) -> nn.Module | None:
    """A fused module with the effect of ``module``, if there is one."""
    for candidate in _candidates(module, call):
        try:
            effect = watcher.again(candidate, call)
        except (RuntimeError, TypeError, ValueError):
            continue  # it is called in another way than the modules that were fused
        if effect.agrees(call.effect):
            return candidate
    return None


def _candidates(module: Any, call: _Call) -> Iterator[nn.Module]:
    variant = call.effect.variant
    if _is_attention(module) and variant is not None:
        offsets = _NORM_OFFSETS if hasattr(module, "q_norm") else _NORM_OFFSETS[:1]
        for offset in offsets:
            yield FusedAttention(module, variant, offset)
    elif _is_gated_mlp(module):
        yield FusedGatedMLP(module)
    elif _is_norm(module) and call.arguments[0].dtype == module.weight.dtype:
        for offset in _NORM_OFFSETS:
            yield FusedRMSNorm(module, offset)


def _is_attention(module: Any) -> bool:
    parts = {name for name, _ in module.named_children()}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if parts not in (projections, projections | {"q_norm", "k_norm"}):
        return False
    norms_fit = "q_norm" not in parts or all(
        _is_norm(norm) and len(norm.weight) == module.head_dim
        for norm in (module.q_norm, module.k_norm)
    )
    return norms_fit and all(type(getattr(module, name)) is nn.Linear for name in projections)


def _is_gated_mlp(module: Any) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    parts = {name for name, _ in module.named_children()}
    return parts in ({*names}, {*names, "act_fn"}) and all(
        type(getattr(module, name)) is nn.Linear for name in names
    )


def _is_norm(module: Any) -> bool:
    weights = dict(module.named_parameters())
    has_eps = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    return type(module).__name__.endswith("RMSNorm") and [*weights] == ["weight"] and has_eps


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    difference = (ours.float() - theirs.float()).abs().max()
    return bool(difference <= _TOLERANCE[theirs.dtype] * theirs.float().abs().max())
