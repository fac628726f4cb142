"""Log-probabilities of given tokens, with logits taken a few rows at a time.

A prompt has as many rows of logits as tokens: for 8,192 tokens and a vocabulary of 150,000 they
take 5 GB in float32. So the model's head is called repeatedly on parts of the hidden states that
the body computed in one pass, and only the requested values of each call's logits are kept.
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
"""Rows of logits to compute at a time: enough for the head to run at full speed. Memory is planned
for them even if ``engine.max_num_seqs`` is less."""


class PromptScorer:
    """Scores given tokens by a model's own head, including changes that its class makes to logits.

    Args:
        model: one of transformers' causal language models: a body, then a head on the rows of
            hidden states that ``logits_to_keep`` names.
        rows: rows of logits to compute at a time.
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
        chunks = []
        with _body_gives(last_of_body(self._model), output):
            for start in range(0, len(tokens.rows), self._rows):
                span = slice(start, start + self._rows)
                logits = self._head(on["rows"][span], output[0].shape[1])
                chunks.append(_score_tokens(logits, on["ids"][span], tokens, span))
        reported, finite = zip(*chunks, strict=True)
        found = Reported(*map(torch.cat, zip(*reported, strict=True)))
        return SampleHandle(on["ids"], found.values[:, 0], ~torch.cat(finite), found)

    def _head(self, rows: Tensor, num_tokens: int) -> Tensor:
        nothing = rows.new_zeros((1, num_tokens))  # Gemma 4 needs their number
        output = self._model(input_ids=nothing, use_cache=False, logits_to_keep=rows)
        logits: Tensor = output.logits[0]
        return logits


def _score_tokens(
    logits: Tensor, ids: Tensor, tokens: ScoredTokens, span: slice
) -> tuple[Reported, Tensor]:
    """Return log-probabilities of a span of ``tokens`` from their logits [P, V], with ``ids`` [P]
    on the device, and whether they are numbers, bool [P]."""
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
def _body_gives(body: torch.nn.Module, output: Any) -> Iterator[None]:
    """Replace the body's result by an output, inside."""
    body.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del body.forward


@dataclass(frozen=True, slots=True)
class ScoredHandle:
    """Handle of a step that also scores prompt tokens."""

    sampled: SampleHandle
    scored: SampleHandle

    def result(self) -> StepResult:
        """The samples and the scored tokens on the host.

        Raises:
            OutOfMemory: the device reports only now that it had no memory for the step.
        """
        return replace(self.sampled.result(), scored=self.scored.result())
