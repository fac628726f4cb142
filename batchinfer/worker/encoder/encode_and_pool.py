"""Runs steps of whole sequences on an encoder: one forward pass, then pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from batchinfer.engine.encoder_step import EncoderStep
from batchinfer.engine.step import Float32
from batchinfer.worker.encoder.attention import Runs
from batchinfer.worker.encoder.loader import Encoder
from batchinfer.worker.oom import raise_out_of_memory
from batchinfer.worker.threads.threads import StepThreads
from batchinfer.worker.transfer import HostCopy, to_device


class ModelEncoder:
    """Runs the steps of an ``EncoderEngine``, and waits for each step."""

    def __init__(
        self, encoder: Encoder, device: torch.device, threads: StepThreads | None = None
    ) -> None:
        self._encoder, self._device, self._threads = encoder, device, threads

    def encode(self, step: EncoderStep) -> Float32:
        """Return the vectors [S, D] of a step's sequences."""
        threads = self._threads.step(step.num_tokens) if self._threads else nullcontext()
        with threads, raise_out_of_memory(), torch.inference_mode():
            runs = step.runs()
            tensors = to_device(_arrays(step), self._device)
            hidden_states = self._encoder(
                tensors["token_ids"], tensors["positions"], tensors["segments"], runs
            )
            unpooled = step.unpooled_of_runs()
            vectors = HostCopy(pool(hidden_states, runs, step.pooling, unpooled)).wait()
        return vectors.astype(np.float32, copy=False)


def _arrays(step: EncoderStep) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return token ids, positions and segments in the integer type that torch indexes with."""
    lengths = step.lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(step.num_tokens, dtype=np.int64) - np.repeat(starts, lengths)
    return {
        "token_ids": step.token_ids.astype(np.int64),
        "positions": positions,
        "segments": (positions >= np.repeat(step.first_segments, lengths)).astype(np.int64),
    }


def _weighted_mean(states: torch.Tensor, first: int) -> torch.Tensor:
    weights = torch.arange(1.0, states.shape[1] + 1, device=states.device) + first
    return (states * weights[:, None]).sum(1) / weights.sum()


POOLING: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "cls": lambda states, first: states[:, 0],
    "lasttoken": lambda states, first: states[:, -1],
    "max": lambda states, first: states.amax(1),
    "mean": lambda states, first: states.sum(1) / states.shape[1],
    "mean_sqrt_len_tokens": lambda states, first: states.sum(1) / states.shape[1] ** 0.5,
    "weightedmean": _weighted_mean,
}
"""The pooling modes of sentence-transformers' Pooling module, keyed by name
(sentence_transformers/sentence_transformer/modules/pooling.py, version 6.2). Each pooling function
maps float32 hidden states [B, L, H], and the index of the first state in its text, to vectors [B,
H]."""


def pool(
    hidden_states: torch.Tensor, runs: Runs, modes: Sequence[str], unpooled: Sequence[int]
) -> torch.Tensor:
    """Pool a packed row of hidden states [T, H] to float32 vectors [S, modes * H].

    Args:
        unpooled: for each run, the number of tokens to leave out at the start of each sequence.
    """
    vectors = []
    for (start, count, length), first in zip(runs, unpooled, strict=True):
        states = hidden_states[start : start + count * length]
        states = states.view(count, length, -1)[:, first:].float()
        vectors.append(torch.cat([POOLING[mode](states, first) for mode in modes], dim=1))
    return torch.cat(vectors)
