"""Makes one vector of a sequence's hidden states, as sentence-transformers' Pooling module does.

sentence_transformers/sentence_transformer/modules/pooling.py, version 6.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from batchinfer.worker.encoder.attention import Runs


def _mean(states: torch.Tensor) -> torch.Tensor:
    return states.sum(1) / states.shape[1]


def _mean_sqrt_len(states: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = states.sum(1) / states.shape[1] ** 0.5
    return total


def _weighted_mean(states: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1.0, states.shape[1] + 1, device=states.device)
    return (states * weights[:, None]).sum(1) / weights.sum()


POOLING: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda states: states[:, 0],
    "lasttoken": lambda states: states[:, -1],
    "max": lambda states: states.amax(1),
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
}
"""From float32 [B, L, H] to [B, H], by the names of sentence-transformers' modes."""


def pool(hidden_states: torch.Tensor, runs: Runs, modes: Sequence[str]) -> torch.Tensor:
    """Pool a packed row of hidden states [T, H] to float32 [S, modes * H]."""
    return torch.cat([_pooled(_batch(hidden_states, *run), modes) for run in runs])


def _batch(hidden_states: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """Neighbours of equal length, float32 [B, L, H]."""
    states = hidden_states[start : start + count * length]
    return states.view(count, length, states.shape[-1]).float()


def _pooled(states: torch.Tensor, modes: Sequence[str]) -> torch.Tensor:
    return torch.cat([POOLING[mode](states) for mode in modes], dim=1)
