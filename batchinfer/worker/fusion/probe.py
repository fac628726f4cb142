"""Runs a model's modules, and what might take their place, on the same few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.step import Step
from batchinfer.worker.attention.attention import (
    AttentionBackend,
    ForwardContext,
    forward_context,
    make_backend,
)
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.probe_step import probe_step

_TOKENS = (3, 7, 5, 3)
_MODERATE = 1.0
"""Larger inputs than that saturate a softmax, where rounding decides between two keys."""


class Call(NamedTuple):
    """How a module was called, and what it asked of paged attention if it did."""

    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    variant: AttentionVariant | None

    def float_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors it was given, those in pairs (cos and sin) among them."""
        for value in (*self.arguments, *self.options.values()):
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, torch.Tensor) and item.is_floating_point():
                    yield item

    def scaled(self, scale: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in float32, the first tensor of them (what flows through) scaled."""
        first = next(self.float_tensors())

        def changed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(changed, value))
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value.float() * scale if value is first else value.float()
            return value

        options = {name: changed(value) for name, value in self.options.items()}
        return tuple(map(changed, self.arguments)), options


class Probe:
    """Four tokens at positions from the first to the last, and a cache of one sequence for them.

    Args:
        layout: of a pool for the model.
        max_model_len: positions go up to the last one.
    """

    def __init__(self, model: nn.Module, layout: KVLayout, max_model_len: int) -> None:
        positions = (0, 1, max_model_len // 2, max_model_len - 1)
        weight = next(model.parameters())
        self._model = model
        self._step = probe_step(_TOKENS, 1, layout, positions)
        assert layout.block_size >= len(_TOKENS)

        def cache(dtype: torch.dtype) -> KVCache:
            return KVCache(layout, self._step.block_tables.size, weight.device, dtype)

        self._own, self._float32 = _Watcher(cache(weight.dtype)), _Watcher(cache(torch.float32))
        self.calls: dict[str, Call] = {}
        """Calls of the modules that were wanted, by their names."""

    def run(self, wanted: Callable[[nn.Module], bool]) -> torch.Tensor:
        """Logits [4, vocabulary] of the model as it is now; notes the calls of wanted modules."""
        hooks = [
            module.register_forward_hook(self._note(name), with_kwargs=True)
            for name, module in self._model.named_modules()
            if wanted(module)
        ]
        try:
            return forward(self._model, self._own.cache, self._own, self._step)
        finally:
            for hook in hooks:
                hook.remove()

    def agree(self, ours: nn.Module, theirs: nn.Module, call: Call, scale: float) -> bool:
        """Whether two float32 modules do the same in the place of a call, its input scaled."""
        arguments, options = call.scaled(scale)
        watcher = self._float32
        watcher.begin_again(self._own)
        with forward_context(watcher.context):
            effects = [
                watcher.effect(module(*arguments, **options), with_output=scale <= _MODERATE)
                for module in (ours, theirs)
            ]
        return len(effects[0]) == len(effects[1]) and all(map(_elements_agree, *effects))

    def _note(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
            asked = self._own.take() if hasattr(module, "layer_idx") else None
            self.calls[name] = Call(arguments, options, None if asked is None else asked.variant)

        return note


class _Asked(NamedTuple):
    layer: int
    query: torch.Tensor
    variant: AttentionVariant


class _Watcher:
    """A backend that notes what it was asked last."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._backend: AttentionBackend = make_backend(cache)
        self._asked: _Asked | None = None

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        self._begun = step, tensors
        self._backend.begin_step(step, tensors)
        self.context = ForwardContext(self.cache, self, tensors)

    def begin_again(self, other: _Watcher) -> None:
        """Take the step that another was given."""
        self.begin_step(*other._begun)

    def attend(self, layer: int, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
        self._asked = _Asked(layer, query.clone(), variant)
        return self._backend.attend(layer, query, variant)

    def take(self) -> _Asked | None:
        """What was asked since the last time."""
        asked, self._asked = self._asked, None
        return asked

    def effect(self, output: Any, *, with_output: bool) -> list[torch.Tensor]:
        """What a module came to: its output; of attention also query, keys and values."""
        given = output[0] if isinstance(output, tuple) else output
        asked = self.take()
        if asked is None:
            return [given]
        written = [block[:, : len(_TOKENS)] for block in self.cache.read(asked.layer, 0)]
        return [asked.query, *written, *([given] if with_output else [])]


def rows_agree(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    """Whether no row [..., width] is further off than ``tolerance`` times its length."""
    ours, theirs = ours.float(), theirs.float()
    finite = theirs.isfinite().all(dim=-1)  # weights that overflow: each row finds out by itself
    off = (ours - theirs).norm(dim=-1)[finite]
    return bool((off <= tolerance * theirs.norm(dim=-1)[finite]).all())


def _elements_agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether every element is the same up to the rounding of float32 sums."""
    if ours.shape != theirs.shape:
        return False
    largest = theirs.abs().amax(dim=-1, keepdim=True)
    return bool(((ours - theirs).abs() <= 1e-4 * theirs.abs() + 2e-5 * largest).all())
