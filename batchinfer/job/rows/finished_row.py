"""Makes a row's output columns from the completions of its requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchinfer.engine.request import (
    Completion,
    Request,
    RequestStats,
    SampleOutput,
    TokenLogprobs,
)
from batchinfer.errors import RowError
from batchinfer.requests.requests import PromptRow
from batchinfer.text.answers import AnswerReader
from batchinfer.text.prompts import Prompt, PromptTooLongError
from batchinfer.text.sample_filter import Tally
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.text.tools.row_tools import RowTools

_TOP = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
LOGPROB = pa.struct(
    [
        ("token_id", pa.int32()),
        ("logprob", pa.float32()),
        ("rank", pa.int32()),
        ("top", pa.list_(_TOP)),
    ]
)
_NO_TALLY = Tally()
_MOST_CALLS = 1000
"""Number of tool call numbers reserved for each sample, so that the tool calls of different samples
have different ids.
"""


@dataclass(frozen=True, slots=True)
class FinishedRow:
    values: dict[str, Any]
    """Values of the generated columns, keyed by column name."""
    stats: RequestStats | None
    """Statistics of the row's requests; None if the engine did not run the row."""
    has_control_text: bool
    distinct_tokens: int = 0
    """Number of prompt tokens after the longest prefix shared with an earlier row."""
    tally: Tally = _NO_TALLY
    key: bytes | None = None
    """Key of the row (``PromptRow.key``); None for a row that failed."""

    @property
    def has_failed(self) -> bool:
        return self.values["error"] is not None


class RowFinisher:
    def __init__(self, answers: AnswerReader, include: Collection[str]) -> None:
        self._answers = answers
        self._include = include

    def finish(self, row: PromptRow, completion: Completion) -> FinishedRow:
        request = completion.request
        outputs = [self._output(sample, request, row.tools) for sample in completion.outputs]
        failed = completion.error_code is not None
        first = None if failed or not outputs else outputs[0]
        results = {
            "generated_text": first and first["text"],
            "outputs": outputs,
            "num_output_tokens": sum(output["num_tokens"] for output in outputs),
        }
        if "reasoning" in self._include:
            results["reasoning"] = first and first["reasoning"]
            counts = (output["num_reasoning_tokens"] for output in outputs)
            results["num_reasoning_tokens"] = sum(counts)
        if "tool_calls" in self._include:
            results["tool_calls"] = first and first["tool_calls"]
        if "prompt" in self._include:
            results["prompt"] = seen_text(row, self._answers.tokenizer)
        if "prompt_logprobs" in self._include:
            results["prompt_logprobs"] = _prompt_logprobs(completion)
        error = error_value(completion.error_code, completion.error_message) if failed else None
        return finished_row(row, results, error, stats_of(completion))

    def _output(
        self, sample: SampleOutput, request: Request, tools: RowTools | None
    ) -> dict[str, Any]:
        given = None if tools is None else tools.tools
        answer = self._answers.read(request.prompt_token_ids, sample, request.params, given)
        output = {
            "index": sample.index,
            "text": answer.text,
            "finish_reason": sample.finish_reason,
            "stop_reason": None if sample.stop_reason is None else str(sample.stop_reason),
            "num_tokens": len(sample.token_ids),
            "cumulative_logprob": sample.cumulative_logprob,
        }
        if "token_ids" in self._include:
            output["token_ids"] = sample.token_ids
        if "logprobs" in self._include:
            output["logprobs"] = logprob_values(sample.logprobs)
        if "reasoning" in self._include:
            output["reasoning"] = answer.reasoning
            output["num_reasoning_tokens"] = answer.num_reasoning_tokens
        if "tool_calls" in self._include:
            first = sample.index * _MOST_CALLS
            made = answer.tool_calls if tools is None or tools.several else answer.tool_calls[:1]
            calls = [call.as_openai(first + at) for at, call in enumerate(made)]
            output["tool_calls"] = calls or None
        return output


def seen_text(row: PromptRow, tokenizer: Tokenizer) -> str | None:
    """Return the text of a row's prompt after truncation; None if the prompt has no text."""
    prompt = row.prompt
    assert isinstance(prompt, Prompt)
    if prompt.text is None or not prompt.truncated:
        return prompt.text
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def _prompt_logprobs(completion: Completion) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of the prompt's tokens, with None for the first token."""
    tokens = completion.prompt_token_logprobs()
    return None if tokens is None else [None, *(logprob_values(tokens) or ())]


def logprob_values(tokens: Sequence[TokenLogprobs] | None) -> list[dict[str, Any]] | None:
    """Convert log-probabilities to values of the Arrow type ``LOGPROB``."""
    if tokens is None:
        return None
    return [
        {
            "token_id": token.token_id,
            "logprob": token.logprob,
            "rank": token.rank,
            "top": [{"token_id": token_id, "logprob": value} for token_id, value in token.top],
        }
        for token in tokens
    ]


def stats_of(completion: Completion) -> RequestStats | None:
    """Return the statistics of a request; None if the engine refused it before it ran."""
    return completion.stats if completion.stats.prompt_tokens else None


def finished_row(
    row: PromptRow,
    results: Mapping[str, Any],
    error: Mapping[str, str | None] | None,
    stats: RequestStats | None,
) -> FinishedRow:
    """Make the output of a row that ran: its ``results``, and the columns that all tasks have."""
    assert isinstance(row.prompt, Prompt)
    values = {
        "row_id": row.row_id,
        **results,
        "num_prompt_tokens": len(row.prompt.token_ids),
        "truncated": row.prompt.truncated,
        "status": "ok" if error is None else "error",
        "error": error,
    }
    return FinishedRow(
        values,
        stats,
        row.prompt.has_control_text,
        row.distinct_tokens,
        key=row.key if error is None else None,
    )


def failed_row(row_id: int, error: RowError, results: Mapping[str, Any]) -> FinishedRow:
    """Make the output of a row that the engine did not run.

    Args:
        results: the task's values for a failed row (``Task.failed_results``).
    """
    num_tokens = error.num_tokens if isinstance(error, PromptTooLongError) else None
    values: dict[str, Any] = {
        "row_id": row_id,
        **results,
        "num_prompt_tokens": num_tokens,
        "truncated": False,
        "status": "error",
        "error": error_value(error.code, error.message),
    }
    return FinishedRow(values, None, False)


def error_value(code: str | None, message: str | None) -> dict[str, str | None]:
    return {"code": code, "message": message}
