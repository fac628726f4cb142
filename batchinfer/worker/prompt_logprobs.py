"""Log-probabilities of given tokens, with logits taken a few rows at a time.

A prompt's logits are as many rows as it has tokens: of 8,192 tokens and a vocabulary of 150,000
they are 5 GB in float32. So the model's head is called again and again on the hidden states that
the body gave in one pass, and of each call's logits only what is asked for is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.step import Int32, ScoredTokens, StepResult
from batchinfer.worker.model.body_output import last_of_body
from batchinfer.worker.sampling.logprobs import row_stats, token_ranks, top_logits
from batchinfer.worker.sampling.output import SampleHandle
from batchinfer.worker.sampling.sampler import workspace_rows
from batchinfer.worker.transfer import to_device

SCORED_ROWS = 256
"""Rows of logits taken at a time: enough for the head to run at its speed. They are planned for
where ``engine.max_num_seqs`` is less."""


class PromptScorer:
    """Scorer of given tokens by a model's own head, with whatever its class does to logits.

    Args:
        model: one of transformers' causal language models: a body, then a head on the rows of
            hidden states that ``logits_to_keep`` names.
        rows: of logits at a time.
    """

    def __init__(self, model: torch.nn.Module, rows: int = SCORED_ROWS) -> None:
        self._model = model
        self._rows = rows

    @torch.inference_mode()
    def __call__(self, output: Any, tokens: ScoredTokens) -> SampleHandle:
        """Score the tokens of a step.

        Args:
            output: of the model's body.
            tokens: P tokens.

        Returns:
            The tokens as if they were samples, on their way to the host, with ranks and
            alternatives [P, L]; L is at most the vocabulary.
        """
        arrays = {"rows": tokens.rows.astype(np.int64), "ids": tokens.token_ids.astype(np.int64)}
        on = to_device(arrays, output[0].device)
        num_logprobs = np.full(len(tokens.rows), tokens.num_logprobs.max(), dtype=np.int32)
        chunks = []
        with _body_gives(last_of_body(self._model), output):
            for start in range(0, len(tokens.rows), self._rows):
                span = slice(start, start + self._rows)
                logits = self._head(on["rows"][span], output[0].shape[1])
                chunks.append(_score_tokens(logits, on["ids"][span], num_logprobs[span]))
        logprobs, finite, *alternatives = map(torch.cat, zip(*chunks, strict=True))
        ranks, top_ids, top_logprobs = alternatives
        return SampleHandle(on["ids"], logprobs, ~finite, (ranks, top_ids, top_logprobs))

    def _head(self, rows: Tensor, num_tokens: int) -> Tensor:
        nothing = rows.new_zeros((1, num_tokens))  # Gemma 4 asks how many there were
        output = self._model(input_ids=nothing, use_cache=False, logits_to_keep=rows)
        logits: Tensor = output.logits[0]
        return logits


def _score_tokens(logits: Tensor, ids: Tensor, wanted: Int32) -> tuple[Tensor, ...]:
    """Log-probabilities [P], whether they are numbers [P], ranks [P], the most likely tokens [P, L]
    and their log-probabilities [P, L]."""
    count, vocab = logits.shape
    chunk = workspace_rows(vocab, logits.device.type)
    stats = row_stats(logits, chunk, want_argmax=False)
    rows = np.arange(count, dtype=np.int32)
    every_row = torch.arange(count, device=logits.device)
    values, finite = logits[every_row, ids].float(), stats.maximum.isfinite()
    top_ids, top_values = top_logits(logits, rows, wanted, chunk)
    return (
        stats.logprobs(every_row, values).masked_fill_(~finite, 0),
        finite,
        token_ranks(logits, rows, values, wanted, chunk),
        top_ids,
        stats.logprobs(every_row, top_values),
    )


@contextmanager
def _body_gives(body: torch.nn.Module, output: Any) -> Iterator[None]:
    """Replace what the body computes, inside, by an output."""
    body.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del body.forward


@dataclass(frozen=True, slots=True)
class ScoredHandle:
    """Handle of a step that also scores tokens of prompts."""

    sampled: SampleHandle
    scored: SampleHandle

    def result(self) -> StepResult:
        """The samples and the scored tokens on the host.

        Raises:
            OutOfMemory: the device says only now that it had none for the step.
        """
        return replace(self.sampled.result(), scored=self.scored.result())
