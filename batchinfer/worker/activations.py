"""How many elements a token's activations take, from a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.engine.kv.layout import text_config

# Copies of a token's hidden and of its inner MLP state that are alive at the widest point of a
# layer: residual, normed, q, k, v, rotated q and k, attended; gate, up and their product.
_HIDDEN_COPIES = 8
_INNER_COPIES = 3
# Copies of the logits themselves: the model's own, and one scaled or capped as some families do.
LOGITS_COPIES = 2


def activation_elements(config: Mapping[str, Any]) -> int:
    """Elements of one token, its logits not among them."""
    text = text_config(config)
    hidden = int(text.get("hidden_size") or text.get("n_embd") or 0)
    inner = int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden)
    return _HIDDEN_COPIES * hidden + _INNER_COPIES * inner
