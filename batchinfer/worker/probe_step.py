"""Steps of a few tokens, to see what a model does before it is trusted with a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.step import SamplingBatch, Step


def probe_step(
    token_ids: Sequence[int], num_sequences: int, layout: KVLayout, positions: Sequence[int]
) -> Step:
    """The same tokens in each of several sequences, every logit asked for, nothing sampled.

    Args:
        token_ids: of one sequence.
        num_sequences: each has blocks of its own, from slot 0 on.
        positions: what the model is told of each token of a sequence.
    """
    length, block_size = len(token_ids), layout.block_size
    num_blocks = layout.blocks_for(length)
    table = np.arange(num_sequences * num_blocks, dtype=np.int32).reshape(num_sequences, -1)
    places = np.arange(length)
    slots = table[:, places // block_size].astype(np.int64) * block_size + places % block_size
    return Step(
        token_ids=np.array([*token_ids] * num_sequences, np.int32),
        previous_sample=np.full(num_sequences * length, -1, np.int32),
        positions=np.array([*positions] * num_sequences, np.int32),
        query_starts=np.arange(num_sequences + 1, dtype=np.int32) * length,
        context_lens=np.full(num_sequences, length, np.int32),
        block_tables=table,
        slot_mapping=slots.reshape(-1),
        block_copies=np.empty((0, 2), np.int32),
        logits_indices=np.arange(num_sequences * length, dtype=np.int32),
        sampling=_no_sampling(),
    )


def _no_sampling() -> SamplingBatch:
    values: dict[str, Any] = {entry.name: np.empty(0) for entry in fields(SamplingBatch)}
    return SamplingBatch(**(values | {"penalties": None}))
