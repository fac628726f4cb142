"""Log-probabilities of a prompt's tokens, computed from a few rows of logits at a time.

A prompt has a row of logits for each token. For 8,192 tokens and a vocabulary of 150,000, the
logits take 5 GB in float32. The model's body therefore runs once, and the model's head is called
repeatedly on parts of the hidden states. Only the requested values of each call's logits are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.step import ScoredTokens, StepResult
from batchinfer.worker.model.body import last_of_body
from batchinfer.worker.sampling.logprobs import Reported, look_up, row_stats
from batchinfer.worker.sampling.output import SampleHandle
from batchinfer.worker.sampling.sampler import workspace_rows
from batchinfer.worker.transfer import to_device

SCORED_ROWS = 256
"""Rows of logits to compute at a time: enough for the head to run at full speed. The memory plan
includes this number of rows even if ``engine.max_num_seqs`` is smaller."""


class PromptScorer:
    """Computes log-probabilities of given tokens with a model's head. Logits are scaled or capped
    if the model's class does so.

    Args:
        model: transformers' causal language model. Its ``logits_to_keep`` selects the rows of
            hidden states for the head.
        rows: rows of logits to compute at a time.
    """

    def __init__(self, model: torch.nn.Module, rows: int = SCORED_ROWS) -> None:
        self._model = model
        self._rows = rows

    @torch.inference_mode()
    def __call__(self, output: Any, tokens: ScoredTokens) -> SampleHandle:
        """Score the P tokens of a step, given the output of the model's body.

        Returns:
            A handle that returns the tokens as if they had been sampled, with ranks [P] and
            alternatives [P, L]. L is at most the size of the vocabulary.
        """
        arrays = {"rows": tokens.rows.astype(np.int64), "ids": tokens.token_ids.astype(np.int64)}
        on = to_device(arrays, output[0].device)
        chunks = []
        with _body_output(last_of_body(self._model), output):
            for start in range(0, len(tokens.rows), self._rows):
                span = slice(start, start + self._rows)
                logits = self._head(on["rows"][span], output[0].shape[1])
                chunks.append(_score_tokens(logits, on["ids"][span], tokens, span))
        reported, finite = zip(*chunks, strict=True)
        logprobs = Reported(*map(torch.cat, zip(*reported, strict=True)))
        return SampleHandle(on["ids"], logprobs.values[:, 0], ~torch.cat(finite), logprobs)

    def _head(self, rows: Tensor, num_tokens: int) -> Tensor:
        unused_ids = rows.new_zeros((1, num_tokens))  # Gemma 4 reads how many ids there are
        output = self._model(input_ids=unused_ids, use_cache=False, logits_to_keep=rows)
        logits: Tensor = output.logits[0]
        return logits


def _score_tokens(
    logits: Tensor, ids: Tensor, tokens: ScoredTokens, span: slice
) -> tuple[Reported, Tensor]:
    """Return the log-probabilities of a span of P ``tokens`` from their logits [P, V], and bool
    [P], False for rows whose logits are not finite. ``ids`` [P] are the tokens on the device."""
    count, vocab = logits.shape
    chunk = workspace_rows(vocab, logits.device.type)
    stats, _ = row_stats(logits, chunk)
    finite = stats.maximum.isfinite()
    rows = np.arange(count, dtype=np.int32)
    most = int(tokens.num_logprobs.max())
    wanted = np.full(count, most, dtype=np.int32)
    named = None if tokens.named_token_ids is None else tokens.named_token_ids[span]
    raw = look_up(logits, rows, ids, wanted, named, num_top=min(most, vocab), chunk=chunk)
    values = stats.logprobs(torch.arange(count, device=logits.device), raw.values)
    if tokens.as_logits is not None:
        at = to_device({"at": tokens.as_logits[span]}, logits.device)["at"]
        values = torch.where(at[:, None], raw.values, values)
    values[:, 0].masked_fill_(~finite, 0)
    return raw._replace(values=values), finite


@contextmanager
def _body_output(body: torch.nn.Module, output: Any) -> Iterator[None]:
    """Inside the ``with`` block, make the body return ``output`` without computing."""
    body.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del body.forward


@dataclass(frozen=True, slots=True)
class ScoredHandle:
    sampled: SampleHandle
    scored: SampleHandle

    def result(self) -> StepResult:
        """Return the samples and the scored tokens on the host.

        Raises:
            OutOfMemory: the device had too little memory for the step. On CUDA, this error appears
                only when the result is read.
        """
        return replace(self.sampled.result(), scored=self.scored.result())
