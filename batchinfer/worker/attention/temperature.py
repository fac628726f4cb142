"""Queries scaled by their position: the attention temperature of Llama 4.

Its layers without rotary positions multiply queries by ``1 + s * log(1 + floor((p + 1) / f))``
(``attn_temperature_tuning``; arXiv:2501.19399). transformers counts p from a batch's first token;
in a packed row of many sequences it is the token's position in its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class QueryTemperature(NamedTuple):
    """Parameters of a layer's attention temperature."""

    floor_scale: float
    """f, tokens until it grows."""
    attn_scale: float
    """s."""

    def of(
        self,
        query: torch.Tensor,  # [1, Hq, T, Dk]
        positions: torch.Tensor,  # [T]
    ) -> torch.Tensor:
        """The queries, scaled in float32."""
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        scales = torch.log1p(steps) * self.attn_scale + 1.0
        return (query * scales[:, None]).to(query.dtype)


def temper_queries(model: nn.Module) -> None:
    """Let paged attention scale queries, in place of the layers that do so."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", None) and not getattr(module, "use_rope", 1):
            module.query_temperature = QueryTemperature(module.floor_scale, module.attn_scale)  # type: ignore[arg-type, assignment]
            module.attn_temperature_tuning = False  # type: ignore[assignment]
