"""Modules compared by what they compute in a model, on the same few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.probe import AttentionRecorder, Probe, record_calls

_TOKENS = (3, 7, 5, 3)
_MODERATE = 1.0
"""Larger inputs than that saturate a softmax, where rounding decides between two keys."""


class Call(NamedTuple):
    """Arguments of a module's call, and what it asked of paged attention if it did."""

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


class ModuleComparison:
    """Comparison of modules on four tokens, at positions from the first to the last.

    Args:
        layout: of a pool for the model.
        max_model_len: positions go up to the last one.
    """

    def __init__(self, model: nn.Module, layout: KVLayout, max_model_len: int) -> None:
        assert layout.block_size >= len(_TOKENS)
        positions = (0, 1, max_model_len // 2, max_model_len - 1)
        self._model = model
        self._own = Probe(model, layout, _TOKENS, positions=positions)
        self._float32 = Probe(model, layout, _TOKENS, positions=positions, dtype=torch.float32)
        self.calls: dict[str, Call] = {}
        """Calls of the modules that were wanted, by their names."""

    def run(self, wanted: Callable[[nn.Module], bool]) -> torch.Tensor:
        """Logits [4, vocabulary] of the model as it is now; records the calls of wanted modules."""
        names = {module: name for name, module in self._model.named_modules() if wanted(module)}
        attention = AttentionRecorder(self._own.backend)
        with record_calls(names) as calls:
            logits = self._own.logits(attention)
        variants = {attended.layer: attended.variant for attended in attention.calls}
        for module, arguments, options, _ in calls:
            variant = variants.get(getattr(module, "layer_idx", -1))
            self.calls[names[module]] = Call(arguments, options, variant)
        return logits

    def agree(self, ours: nn.Module, theirs: nn.Module, call: Call, scale: float) -> bool:
        """Whether two float32 modules do the same in the place of a call, its input scaled."""
        arguments, options = call.scaled(scale)
        attention = AttentionRecorder(self._float32.backend)
        effects = []
        with self._float32.in_forward(attention):
            for module in (ours, theirs):
                output = module(*arguments, **options)
                effects.append(self._effect(output, attention, with_output=scale <= _MODERATE))
        return len(effects[0]) == len(effects[1]) and all(map(_elements_agree, *effects))

    def _effect(
        self, output: Any, attention: AttentionRecorder, *, with_output: bool
    ) -> list[torch.Tensor]:
        """Results of a call: the output; of attention also the query, keys and values."""
        result = output[0] if isinstance(output, tuple) else output
        if not attention.calls:
            return [result]
        attended = attention.calls[-1]
        attention.calls.clear()
        written = [
            block[:, : len(_TOKENS)] for block in self._float32.cache.read(attended.layer, 0)
        ]
        return [attended.query, *written, *([result] if with_output else [])]


def rows_agree(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    """Whether no row [..., width] is further off than ``tolerance`` times its norm."""
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
