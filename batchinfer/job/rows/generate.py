"""``task: generate``: generates text that continues a row's prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.engine.request import Completion, Request
from batchinfer.job.rows.finished_row import LOGPROB, FinishedRow, RowFinisher
from batchinfer.job.rows.task import LoadedTask, Task
from batchinfer.job.spec.referenced_files import chat_template_file
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.task_keys import GENERATE
from batchinfer.requests.requests import PromptRow, RequestMaker
from batchinfer.requests.resampling import Resampling
from batchinfer.text.answers import AnswerReader
from batchinfer.text.prompts import PromptBuilder
from batchinfer.text.reasoning.formats import find_reasoning_format
from batchinfer.text.structured.compiled_grammar import GrammarCompiler
from batchinfer.text.tools.formats import find_tool_format

if TYPE_CHECKING:
    from batchinfer.builders.context import EngineContext

_OUTPUT = [
    ("index", pa.int32()),
    ("text", pa.string()),
    ("finish_reason", pa.string()),
    ("stop_reason", pa.string()),
    ("num_tokens", pa.int32()),
    ("cumulative_logprob", pa.float64()),
]
_REASONING = {"reasoning": pa.string(), "num_reasoning_tokens": pa.int32()}
_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_CALL = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)])
_CALLS = {"tool_calls": pa.list_(_CALL)}
_OPTIONAL_OUTPUT = {
    "token_ids": {"token_ids": pa.list_(pa.int32())},
    "logprobs": {"logprobs": pa.list_(LOGPROB)},
    "reasoning": _REASONING,
    "tool_calls": _CALLS,
}
"""Optional fields of samples, keyed by the entry of ``JobSpec.written`` that adds them."""


class Generation(LoadedTask):
    """Makes one request per row, and more requests if too few samples are accepted."""

    def __init__(self, samples: Resampling, finisher: RowFinisher) -> None:
        self._samples = samples
        self._finisher = finisher

    def requests(self, row: PromptRow) -> list[Request]:
        return self._samples.requests(row)

    def follow_up_requests(
        self, row: PromptRow, completions: Sequence[Completion]
    ) -> list[Request]:
        return self._samples.follow_up_requests(row, completions)

    def finish(self, row: PromptRow, completions: Sequence[Completion]) -> FinishedRow:
        completion, tally = self._samples.result(row, completions)
        return replace(self._finisher.finish(row, completion), tally=tally)


def _result_types(job: JobSpec) -> dict[str, pa.DataType]:
    include = job.written
    optional = [
        field
        for name, fields in _OPTIONAL_OUTPUT.items()
        if name in include
        for field in fields.items()
    ]
    return {
        "generated_text": pa.string(),
        **_REASONING,
        **_CALLS,
        "outputs": pa.list_(pa.struct([*_OUTPUT, *optional])),
        "prompt_logprobs": pa.list_(LOGPROB),
        "num_output_tokens": pa.int32(),
    }


def _load(job: JobSpec, context: EngineContext, grammars: GrammarCompiler) -> LoadedTask:
    tokenizer = context.tokenizer
    template = chat_template_file(job.prompt.chat_template)
    reasoning = find_reasoning_format(job.output.asked_reasoning, tokenizer, template)
    answers = AnswerReader(
        tokenizer, reasoning, find_tool_format(job.tool_parser, tokenizer, template)
    )
    requests = RequestMaker(
        tokenizer, context.eos_token_ids, grammars, reasoning, context.vocab_size
    )
    samples = Resampling(requests, answers, job.accept)
    return Generation(samples, RowFinisher(answers, job.written))


def _summarize(row: Mapping[str, Any]) -> tuple[str | None, str]:
    reasons = Counter(item["finish_reason"] for item in row["outputs"] or ())
    ends = ", ".join(f"{reason} x{n}" if n > 1 else reason for reason, n in reasons.items())
    prompt, output = (row[f"num_{kind}_tokens"] or 0 for kind in ("prompt", "output"))
    facts = f"{prompt:,} input tokens, {output:,} output tokens"
    return row["generated_text"], f"{facts}; {ends}" if ends else facts


GENERATE_TASK = Task(
    GENERATE,
    _result_types,
    lambda job: PromptBuilder,
    _load,
    _summarize,
    ("generated_text", "outputs.list.element.finish_reason", "num_output_tokens"),
    {
        "generated_text": None,
        "outputs": [],
        "num_output_tokens": 0,
        "reasoning": None,
        "num_reasoning_tokens": 0,
        "tool_calls": None,
    },
)
