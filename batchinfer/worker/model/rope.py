"""Rotary positions that depend on a token's own position alone.

transformers chooses a LongRoPE model's set of frequencies by the longest position in the batch, so
that what stands beside a row would change its tokens. Here the set is chosen once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from batchinfer.errors import ModelError


def fix_longrope(model: torch.nn.Module, max_model_len: int) -> None:
    """Choose each LongRoPE set from ``max_model_len`` and keep it.

    Raises:
        ModelError: the model chooses in a way that cannot be fixed.
    """
    fixed = 0
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope" and hasattr(module, "inv_freq"):
            _fix(module, max_model_len)
            fixed += 1
    if fixed == 0 and uses_longrope(getattr(model, "config", None)):
        raise ModelError("the model's rotary positions (longrope) are not where they are expected")


def _fix(module: torch.nn.Module, max_model_len: int) -> None:
    frequencies = module.inv_freq
    assert isinstance(frequencies, torch.Tensor)
    like = frequencies.new_zeros(1)
    alone = torch.tensor([[0, 1]], device=frequencies.device)
    beside_last = torch.tensor([[0, 1, max_model_len - 1]], device=frequencies.device)
    # One call with the last position makes transformers choose; under another name it stays.
    module(like, position_ids=beside_last)
    module.rope_type = "default"  # type: ignore[assignment]
    beside = module(like, position_ids=beside_last)
    for got, expected in zip(module(like, position_ids=alone), beside, strict=True):
        if not torch.equal(got, expected[:, :2]):
            raise ModelError(
                f"{type(module).__name__} chooses its rotary positions by the longest row in the "
                "batch (longrope) and cannot be fixed; the model cannot be run"
            )


def uses_longrope(config: Any) -> bool:
    """Whether the text part of a config asks for LongRoPE."""
    text = getattr(config, "get_text_config", lambda: config)()
    rope = getattr(text, "rope_parameters", None) or {}
    entries = [rope, *(entry for entry in rope.values() if isinstance(entry, Mapping))]
    return any(entry.get("rope_type") == "longrope" for entry in entries)
