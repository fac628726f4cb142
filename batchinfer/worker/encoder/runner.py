"""Runs steps of whole sequences on an encoder: one forward pass, then pooling."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from batchinfer.engine.encoder_step import EncoderRunner, EncoderStep
from batchinfer.engine.step import Float32
from batchinfer.worker.encoder.loader import Encoder
from batchinfer.worker.encoder.pooling import pool
from batchinfer.worker.oom import raise_out_of_memory
from batchinfer.worker.threads.governor import ThreadGovernor
from batchinfer.worker.threads.threads import TORCH_THREADS
from batchinfer.worker.transfer import HostCopy, to_device


class ModelEncoder:
    """The data plane of an ``EncoderEngine``; waits for each step."""

    def __init__(self, encoder: Encoder, device: torch.device) -> None:
        self._encoder, self._device = encoder, device

    def encode(self, step: EncoderStep) -> Float32:
        """Vectors [S, D] of a step's sequences.

        Raises:
            OutOfMemory: there is none for it.
        """
        runs = step.runs()
        with raise_out_of_memory(), torch.inference_mode():
            tensors = to_device(_arrays(step), self._device)
            hidden_states = self._encoder(
                tensors["token_ids"], tensors["positions"], tensors["segments"], runs
            )
            unpooled = step.unpooled_of_runs()
            vectors = HostCopy(pool(hidden_states, runs, step.pooling, unpooled)).wait()
        return vectors.astype(np.float32, copy=False)


class GovernedEncoder:
    """A runner whose steps compute on as many of a CPU's threads as a governor says; None: on
    ``count``.

    Args:
        clock: seconds.
    """

    def __init__(
        self,
        runner: EncoderRunner,
        count: int,
        governor: ThreadGovernor | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner, self._count, self._governor, self._clock = runner, count, governor, clock

    def encode(self, step: EncoderStep) -> Float32:
        """Compute one step."""
        governor = self._governor
        count = self._count if governor is None else governor.begin()
        began = self._clock()
        with TORCH_THREADS.team(count):
            vectors = self._runner.encode(step)
        if governor is not None:
            governor.observe(step.num_tokens, self._clock() - began)
        return vectors


def _arrays(step: EncoderStep) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Tokens, their positions and segments, in the integer type torch indexes with."""
    lengths = step.lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(step.num_tokens, dtype=np.int64) - np.repeat(starts, lengths)
    return {
        "token_ids": step.token_ids.astype(np.int64),
        "positions": positions,
        "segments": (positions >= np.repeat(step.first_segments, lengths)).astype(np.int64),
    }
