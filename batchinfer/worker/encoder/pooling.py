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


def _weighted_mean(states: torch.Tensor, first: int) -> torch.Tensor:
    weights = torch.arange(1.0, states.shape[1] + 1, device=states.device) + first
    return (states * weights[:, None]).sum(1) / weights.sum()


POOLING: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "cls": lambda states, first: states[:, 0],
    "lasttoken": lambda states, first: states[:, -1],
    "max": lambda states, first: states.amax(1),
    "mean": lambda states, first: _mean(states),
    "mean_sqrt_len_tokens": lambda states, first: _mean_sqrt_len(states),
    "weightedmean": _weighted_mean,
}
"""From float32 [B, L, H] to [B, H], by the names of sentence-transformers' modes; given the place
of the first state in its text too."""


def pool(
    hidden_states: torch.Tensor, runs: Runs, modes: Sequence[str], unpooled: Sequence[int]
) -> torch.Tensor:
    """Pool a packed row of hidden states [T, H] to float32 [S, modes * H].

    Args:
        unpooled: first tokens of each run's sequences that are left out.
    """
    return torch.cat(
        [
            _pooled(_batch(hidden_states, *run)[:, first:], modes, first)
            for run, first in zip(runs, unpooled, strict=True)
        ]
    )


def _batch(hidden_states: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """Neighbours of equal length, float32 [B, L, H]."""
    states = hidden_states[start : start + count * length]
    return states.view(count, length, states.shape[-1]).float()


def _pooled(states: torch.Tensor, modes: Sequence[str], first: int) -> torch.Tensor:
    return torch.cat([POOLING[mode](states, first) for mode in modes], dim=1)
