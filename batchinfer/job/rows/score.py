"""``task: score``: computes log-probabilities of a row's completions, or of its prompt.

A row has one request for each completion. The request's prompt is the row's prompt plus the
completion without its last token, which becomes the request's ``given_token``. The request needs
logits only from the last token of the row's prompt onward. All completions share the prompt's
tokens before that last token, so the prefix cache provides these tokens. A row without completions
has one request, which scores all tokens of the prompt except the first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
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
from batchinfer.job.spec.task_keys import SCORE
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


class Scoring(LoadedTask):
    def __init__(self, tokenizer: Tokenizer, include: Collection[str]) -> None:
        self._tokenizer = tokenizer
        self._include = include

    def requests(self, row: PromptRow) -> list[Request]:
        prompt = row.prompt
        assert isinstance(prompt, ScoredPrompt)
        sequences = list(_sequences(prompt))
        later = [len(prompt.token_ids)] * (len(sequences) - 1) + [row.reused_prefix_len]
        # The first completion's request computes the state from which the other requests start.
        points = Counter(dict(row.branch_points))
        if len(sequences) > 1:
            points[len(prompt.token_ids) - 1] += len(sequences) - 1
        return [
            Request(
                row_id=row.row_id,
                number=number,
                prompt_token_ids=tokens[:-1],
                params=SCORING,
                rng_key=(0, row.row_id),
                reused_prefix_len=later[number],
                branch_points=() if number else tuple(sorted(points.items())),
                scored_from=scored_from,
                given_token=int(tokens[-1]),
                adapter=row.adapter,
            )
            for number, (tokens, scored_from) in enumerate(sequences)
        ]

    def finish(self, row: PromptRow, completions: Sequence[Completion]) -> FinishedRow:
        prompt = row.prompt
        assert isinstance(prompt, ScoredPrompt)
        error = _error(prompt, completions)
        scores = None if error else [_score(at, one) for at, one in enumerate(completions)]
        results: dict[str, Any] = {
            "score": scores and [self._included(score) for score in scores],
            "perplexity": scores and _perplexity([p for one in scores for p in one["logprobs"]]),
        }
        if "prompt" in self._include:
            results["prompt"] = seen_text(row, self._tokenizer)
        stats = combined_stats([c.stats for c in completions if c.stats.prompt_tokens])
        stats = stats and replace(stats, output_tokens=0)  # the token was given, not drawn
        return finished_row(row, results, error, stats)

    def _included(self, score: Mapping[str, Any]) -> dict[str, Any]:
        left_out = _OPTIONAL_SCORE.keys() - self._include
        return {name: value for name, value in score.items() if name not in left_out}


def _score(index: int, completion: Completion) -> dict[str, Any]:
    request, of_prompt = completion.request, completion.prompt_logprobs
    (output,) = completion.outputs
    assert of_prompt is not None
    assert output.logprobs is not None
    (last,) = output.logprobs
    logprobs = [*of_prompt.logprobs.tolist(), last.logprob]
    before = request.prompt_token_ids[request.scored_from :]
    return {
        "index": index,
        "sum_logprob": math.fsum(logprobs),
        "num_tokens": len(logprobs),
        "greedy_match": bool((of_prompt.ranks == 1).all()) and last.rank == 1,
        "token_ids": np.concatenate([before, output.token_ids]),
        "logprobs": logprobs,
    }


def _perplexity(logprobs: Sequence[float]) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(-math.fsum(logprobs) / len(logprobs)))


def _sequences(prompt: ScoredPrompt) -> Iterator[tuple[TokenIds, int]]:
    """Yield the token ids of each request, and the index of the first scored token."""
    if not prompt.completions:
        yield prompt.token_ids, 1
    for completion in prompt.completions:
        yield np.concatenate([prompt.token_ids, completion]), len(prompt.token_ids)


def _error(prompt: ScoredPrompt, completions: Sequence[Completion]) -> dict[str, Any] | None:
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


def _summarize(row: Mapping[str, Any]) -> tuple[str | None, str]:
    facts = f"{row['num_prompt_tokens'] or 0:,} input tokens"
    if row["score"] is None:
        return None, facts
    scores = ", ".join(f"{at}: {one['sum_logprob']:.3f}" for at, one in enumerate(row["score"]))
    return f"log-likelihood {scores}", f"{facts}; perplexity {row['perplexity']:.4g}"


SCORE_TASK = Task(
    SCORE,
    _result_types,
    lambda job: partial(ScoringBuilder, completions_column=_completions_column(job)),
    lambda job, context, grammars: Scoring(context.tokenizer, job.output.include),
    _summarize,
    ("score.list.element.sum_logprob", "perplexity"),
    {"score": None, "perplexity": None},
    _check_columns,
)
