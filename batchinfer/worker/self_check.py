"""A forward pass of four tokens, after loading: does this model do what paged attention needs?

Two equal sequences of two tokens stand side by side in one packed row. Every layer must ask for
paged attention once, in order, with the layout's shapes and the window its config says; and both
sequences must get the same logits, which they do not where a model ignores the positions it is
given or mixes neighbours (a convolution, recurrent state, a bias by distance).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from batchinfer.engine.layout import KVLayout
from batchinfer.engine.step import SamplingBatch, Step
from batchinfer.errors import ModelError
from batchinfer.worker.attention import AttentionBackend, UnsupportedAttentionError, make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.variant import AttentionVariant

_TOKENS = (3, 7)
_RELATIVE_TOLERANCE = 2e-2  # of the largest logit: enough for 16-bit weights


def check_model(model: torch.nn.Module, layout: KVLayout) -> None:
    """Run the check on the device the model is on.

    Raises:
        ModelError: naming the family and what it does differently.
    """
    config: Any = model.config
    try:
        logits, windows = _probe(model, layout)
        _check_windows(windows, config.get_text_config())
        _check_logits(logits)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises on its first call
        raise ModelError(
            f"models of the family {config.model_type!r} cannot be run: {error}"
        ) from error


def _probe(model: torch.nn.Module, layout: KVLayout) -> tuple[torch.Tensor, list[int]]:
    """Logits [4, vocabulary] of the two sequences, and each layer's window."""
    weight = next(model.parameters())
    step = _two_sequences(layout.blocks_for(len(_TOKENS)), layout.block_size)
    cache = KVCache(layout, step.block_tables.size, weight.device, weight.dtype)
    recorder = _Recorder(make_backend(cache), layout)
    logits = forward(model, cache, recorder, step)
    if len(recorder.windows) != layout.num_layers:
        raise UnsupportedAttentionError(
            f"{len(recorder.windows)} of its {layout.num_layers} layers ask for paged attention"
        )
    return logits, recorder.windows


def _two_sequences(blocks_each: int, block_size: int) -> Step:
    """The same tokens twice, in blocks of their own."""
    length = len(_TOKENS)
    table = np.arange(2 * blocks_each, dtype=np.int32).reshape(2, blocks_each)
    positions = np.arange(length)
    slots = table[:, positions // block_size] * block_size + positions % block_size
    return Step(
        token_ids=np.array(_TOKENS * 2, np.int32),
        positions=np.tile(positions, 2).astype(np.int32),
        query_starts=np.array([0, length, 2 * length], np.int32),
        context_lens=np.array([length, length], np.int32),
        block_tables=table,
        slot_mapping=slots.reshape(-1).astype(np.int64),
        block_copies=np.empty((0, 2), np.int32),
        logits_indices=np.arange(2 * length, dtype=np.int32),
        sampling=_no_sampling(),
    )


def _no_sampling() -> SamplingBatch:
    values: dict[str, Any] = {entry.name: np.empty(0) for entry in fields(SamplingBatch)}
    return SamplingBatch(**(values | {"penalties": None}))


def _check_windows(windows: list[int], config: Any) -> None:
    """Compare the windows the layers asked for with the kinds of layers the config names."""
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if (kind == "sliding_attention") != (windows[layer] > 0):
            raise UnsupportedAttentionError(
                f"layer {layer} is of the type {kind} and asks for a window of {windows[layer]}"
            )


def _check_logits(logits: torch.Tensor) -> None:
    first, second = logits.float().view(2, len(_TOKENS), -1)
    if not (first.isfinite().all() and second.isfinite().all()):
        return  # weights that overflow: each row finds out by itself
    if (first - second).abs().max() > _RELATIVE_TOLERANCE * first.abs().max():
        raise UnsupportedAttentionError(
            "what stands beside a row changes it (positions or neighbours are mixed up)"
        )


@dataclass
class _Recorder:
    """Notes each call of a backend on its way."""

    backend: AttentionBackend
    layout: KVLayout
    windows: list[int] = field(default_factory=list)

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        self.backend.begin_step(step, tensors)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        if layer != len(self.windows):
            raise UnsupportedAttentionError(f"its layers do not attend in order (layer {layer})")
        shapes = [tuple(key.shape[1:]), tuple(value.shape[1:])]
        heads = self.layout.num_kv_heads
        expected = [(heads, self.layout.key_width), (heads, self.layout.value_width)]
        if shapes != expected:
            raise UnsupportedAttentionError(
                f"layer {layer} has keys and values of {shapes} where its config says {expected}"
            )
        self.windows.append(variant.sliding_window)
        return self.backend.attend(layer, query, key, value, variant)
