"""``task: score``: how likely a row's completions are, or its prompt itself.

Each completion is a request of its own: the prompt and all of the completion but its last token,
which is the request's given token. So its logits are needed from the prompt's last token on, what
is before that is found in the prefix index, and the row's completions share it. A prompt that is
itself scored is a request in which every token but the first is judged.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.config import SCORING
from batchinfer.engine.request import Completion, Request, TokenIds, combined_stats
from batchinfer.job.input.dataset import Source
from batchinfer.job.rows.column_checks import check_completions_column
from batchinfer.job.rows.finished_row import (
    FinishedRow,
    error_value,
    finished_row,
    seen_text,
)
from batchinfer.job.rows.task import LoadedTask, Task
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.tasks import SCORE
from batchinfer.requests.requests import PromptRow
from batchinfer.text.scoring_prompts import ScoredPrompt, ScoringBuilder
from batchinfer.text.tokenizer import Tokenizer

_SCORE = [
    ("index", pa.int32()),
    ("sum_logprob", pa.float64()),
    ("num_tokens", pa.int32()),
    ("greedy_match", pa.bool_()),
]
_OPTIONAL_SCORE = {"token_ids": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32())}


@dataclass(frozen=True, slots=True)
class _Judged:
    """One completion's tokens and what the model gives for them."""

    token_ids: TokenIds
    logprobs: list[float]
    greedy_match: bool

    @classmethod
    def of(cls, completion: Completion) -> _Judged:
        request, of_prompt = completion.request, completion.prompt_logprobs
        (output,) = completion.outputs
        assert of_prompt is not None
        assert output.logprobs is not None
        (last,) = output.logprobs
        before = request.prompt_token_ids[request.scored_from :]
        return cls(
            np.concatenate([before, output.token_ids]),
            [*of_prompt.logprobs.tolist(), last.logprob],
            bool((of_prompt.ranks == 1).all()) and last.rank == 1,
        )


class Scoring(LoadedTask):
    """A request for each completion of a row."""

    def __init__(self, tokenizer: Tokenizer, include: Collection[str]) -> None:
        self._tokenizer = tokenizer
        self._include = include

    def requests(self, row: PromptRow) -> list[Request]:
        """A request for each completion, or one for the prompt."""
        prompt = row.prompt
        assert isinstance(prompt, ScoredPrompt)
        sequences = list(_sequences(prompt))
        later = [len(prompt.token_ids)] * (len(sequences) - 1) + [row.reused_prefix_len]
        return [
            Request(
                row_id=row.row_id,
                number=number,
                prompt_token_ids=tokens[:-1],
                params=SCORING,
                rng_key=(0, row.row_id),
                reused_prefix_len=later[number],
                scored_from=scored_from,
                given_token=int(tokens[-1]),
                adapter=row.adapter,
            )
            for number, (tokens, scored_from) in enumerate(sequences)
        ]

    def finish(self, row: PromptRow, completions: Sequence[Completion]) -> FinishedRow:
        """The row with the scores of its completions."""
        prompt = row.prompt
        assert isinstance(prompt, ScoredPrompt)
        error = _error(prompt, completions)
        judged = [] if error else list(map(_Judged.of, completions))
        results: dict[str, Any] = {
            "score": None if error else [self._score(at, one) for at, one in enumerate(judged)],
            "perplexity": None if error else perplexity(judged),
        }
        if "prompt" in self._include:
            results["prompt"] = seen_text(row, self._tokenizer)
        stats = combined_stats([c.stats for c in completions if c.stats.prompt_tokens])
        stats = stats and replace(stats, output_tokens=0)  # what was drawn was given
        return finished_row(row, results, error, stats)

    def _score(self, index: int, judged: _Judged) -> dict[str, Any]:
        score: dict[str, Any] = {
            "index": index,
            "sum_logprob": math.fsum(judged.logprobs),
            "num_tokens": len(judged.logprobs),
            "greedy_match": judged.greedy_match,
        }
        if "token_ids" in self._include:
            score["token_ids"] = judged.token_ids
        if "logprobs" in self._include:
            score["logprobs"] = judged.logprobs
        return score


def perplexity(judged: Sequence[_Judged]) -> float:
    """exp of minus the mean log-probability of all tokens that were scored for a row."""
    logprobs = [logprob for one in judged for logprob in one.logprobs]
    with np.errstate(over="ignore"):
        return float(np.exp(-math.fsum(logprobs) / len(logprobs)))


def _sequences(prompt: ScoredPrompt) -> Iterator[tuple[TokenIds, int]]:
    """Tokens, and where those begin that are scored."""
    if not prompt.completions:
        yield prompt.token_ids, 1
    for completion in prompt.completions:
        yield np.concatenate([prompt.token_ids, completion]), len(prompt.token_ids)


def _error(prompt: ScoredPrompt, completions: Sequence[Completion]) -> dict[str, Any] | None:
    """The error of the first of a row's requests that failed."""
    for at, completion in enumerate(completions):
        if completion.error_code is not None:
            where = f"completion {at}: " if prompt.completions else ""
            return error_value(completion.error_code, f"{where}{completion.error_message}")
    return None


def _result_types(job: JobSpec) -> dict[str, pa.DataType]:
    include = job.written
    optional = [(name, kind) for name, kind in _OPTIONAL_SCORE.items() if name in include]
    return {"score": pa.list_(pa.struct([*_SCORE, *optional])), "perplexity": pa.float64()}


def _completions_column(job: JobSpec) -> str | None:
    return None if job.score is None else job.score.completions_column


def _check_columns(job: JobSpec, source: Source) -> None:
    column = _completions_column(job)
    if column is not None:
        check_completions_column(column, source)


def _summarise(row: Mapping[str, Any]) -> tuple[str | None, str]:
    """The completions' log-likelihoods, and the row's perplexity."""
    facts = f"{row['num_prompt_tokens'] or 0:,} tokens in"
    if row["score"] is None:
        return None, facts
    found = ", ".join(f"{at}: {one['sum_logprob']:.3f}" for at, one in enumerate(row["score"]))
    return f"log-likelihood {found}", f"{facts}; perplexity {row['perplexity']:.4g}"


SCORE_TASK = Task(
    SCORE,
    _result_types,
    lambda job: partial(ScoringBuilder, completions_column=_completions_column(job)),
    lambda job, context, grammars: Scoring(context.tokenizer, job.output.include),
    _summarise,
    ("score.list.element.sum_logprob", "perplexity"),
    {"score": None, "perplexity": None},
    _check_columns,
)
