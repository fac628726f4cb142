"""Queries scaled by their position: the attention temperature of Llama 4.

Llama 4's layers without rotary positions multiply queries by ``1 + s * log(1 + floor((p + 1) /
f))`` (``attn_temperature_tuning``; arXiv:2501.19399). transformers counts p from the first token of
a row. In this project, a row packs the tokens of many sequences, so p must be the token's position
in its own sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class QueryTemperature(NamedTuple):
    floor_scale: float
    """f in the module's formula: the first f - 1 queries of a sequence are not scaled."""
    attn_scale: float
    """s in the module's formula."""

    def of(
        self,
        query: torch.Tensor,  # [1, Hq, T, Dk]
        positions: torch.Tensor,  # [T]
    ) -> torch.Tensor:
        """Return the queries, scaled in float32."""
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        scales = torch.log1p(steps) * self.attn_scale + 1.0
        return (query * scales[:, None]).to(query.dtype)


def temper_queries(model: nn.Module) -> None:
    """Disable query scaling in the model's layers, and let paged attention scale the queries
    instead."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", None) and not getattr(module, "use_rope", 1):
            module.query_temperature = QueryTemperature(module.floor_scale, module.attn_scale)  # type: ignore[arg-type, assignment]
            module.attn_temperature_tuning = False  # type: ignore[assignment]
