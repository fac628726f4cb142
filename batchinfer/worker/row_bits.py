"""Checks that a row's logits do not depend on what is computed beside it, to the last bit."""

from __future__ import annotations

from typing import Any

import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import ModelError
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.probe_step import probe_step

_STEPS = (((3,), (1, 2, 3, 8, 33)), ((3, 7, 5, 3, 11), (1, 2, 5, 13)))
"""Tokens of a sequence, and how many equal sequences a step has."""


def check_row_bits(model: torch.nn.Module, layout: KVLayout) -> None:
    """Compare a sequence's logits alone and beside others; a model on the CPU.

    Args:
        layout: of the pool that the model will run over.

    Raises:
        ModelError: they differ.
    """
    for tokens, counts in _STEPS:
        alone = _logits(model, layout, tokens, 1)
        for count in counts:
            beside = _logits(model, layout, tokens, count)
            if not torch.equal(beside, alone.repeat(count, 1)):
                config: Any = model.config
                raise ModelError(
                    "engine.deterministic is true, but in models of the family "
                    f"{config.model_type!r} some layers compute a row's last bits in another way "
                    "when other rows stand beside it",
                    hint="set engine.deterministic: false",
                )


def _logits(
    model: torch.nn.Module, layout: KVLayout, tokens: tuple[int, ...], count: int
) -> torch.Tensor:
    """[count * tokens, vocabulary]"""
    step = probe_step(tokens, count, layout, range(len(tokens)))
    weight = next(model.parameters())
    cache = KVCache(layout, step.block_tables.size, weight.device, weight.dtype)
    return forward(model, cache, make_backend(cache), step)
