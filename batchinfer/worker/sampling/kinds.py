"""The kinds of sampling batches that a job's steps have, as batches of one sample.

Which kernels draw a batch, and what they are compiled for, follows from its kind, so that drawing
these ahead leaves nothing to be compiled within a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from batchinfer.config import SamplingParams
from batchinfer.engine.step import SamplingBatch, SamplingColumns


def batch_kinds(params: SamplingParams, vocab: int) -> Iterator[SamplingBatch]:
    """Batches such as samples with these parameters come in, each of a row of ``vocab`` logits.

    Logits of most are the model's; those of others, or of all, are edited: by penalties, a bias, a
    list of what is allowed, a ban of bad words or of an early end.
    """
    drawn = _one_sample(params)
    if params.structured_outputs is not None:
        words = np.full((1, -(-vocab // 32)), -1, np.int32)
        drawn = replace(drawn, masked_rows=np.zeros(1, np.int32), masks=words)
    always = params.has_penalties or params.logit_bias or params.allowed_token_ids is not None
    if not always:
        yield drawn
    if always or params.bad_words or params.min_tokens > 0:
        at_0 = np.zeros(1, np.int32)
        yield replace(
            drawn, bias_samples=at_0, bias_token_ids=at_0, bias_values=np.zeros(1, np.float32)
        )


def _one_sample(params: SamplingParams) -> SamplingBatch:
    columns = SamplingColumns.zeros(1)
    columns.set_row(
        0,
        params,
        top_k=max(params.top_k, 0),
        seed=0,
        stream=0,
        sample_index=0,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
    )
    at_0 = np.zeros(1, np.int32)
    values: dict[str, Any] = columns.take(at_0)
    values |= {"logits_rows": at_0, "position": at_0, "penalties": None}
    for name in ("bias_samples", "bias_token_ids", "allowed_samples", "allowed_token_ids"):
        values[name] = np.empty(0, np.int32)
    return SamplingBatch(**values, bias_values=np.empty(0, np.float32))
