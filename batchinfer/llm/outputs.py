"""Results of the Python API: outputs of calls, and ``LLM.stats`` as a table."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields
from functools import wraps
from html import escape
from typing import Any, TypeVar

from batchinfer.config.call_params import BeamSearchParams, SamplingParams
from batchinfer.engine.images import PromptImage
from batchinfer.engine.request import Completion, Request, RequestStats, SampleOutput
from batchinfer.engine.step import Float32
from batchinfer.errors import RowError
from batchinfer.llm.logprobs import (
    Logprob,
    Logprobs,
    PromptLogprobs,
    output_logprobs,
    prompt_logprobs,
)
from batchinfer.llm.lora import LoRARequest
from batchinfer.text.answers import Answer, AnswerReader
from batchinfer.text.detokenize import MAX_CHAR_TOKENS
from batchinfer.text.prompts import Prompt
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.text.tools.row_tools import RowTools
from batchinfer.text.tools.tool_format import ToolCall

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """``stop``, ``length`` or ``error``."""
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities; None unless the call requests logprobs or is a beam
    search."""
    logprobs: Logprobs | None = None
    score: float | None = None
    """Score that ranks beams; None without beam search."""
    reasoning: str | None = None
    """The model's reasoning, which ``text`` does not contain; only with ``LLM(reasoning=...)``."""
    num_reasoning_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls, which ``text`` does not contain; only with ``LLM(tool_parser=...)`` and
    ``chat(tools=...)``. Each call has a ``name`` and ``arguments`` as JSON text."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times at which a prompt arrived, started and finished, under vLLM's names.

    Times are in seconds. ``arrival_time`` is a wall clock time (``time.time``). Times that end in
    ``_ts`` count from the time when the prompt was queued. ``last_token_ts`` is the time of the
    last token of the sample that finished last. If a prompt never ran, all times except
    ``arrival_time`` are 0.
    """

    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    num_generation_tokens: int

    @property
    def first_token_latency(self) -> float:
        """Seconds from queuing to the first token."""
        return self.first_token_ts - self.queued_ts

    @property
    def time_in_queue(self) -> float:
        """Seconds from queuing to the first step."""
        return self.scheduled_ts - self.queued_ts

    @property
    def first_scheduled_time(self) -> float:
        """Wall clock time of the first step."""
        return self.arrival_time + self.scheduled_ts

    @property
    def first_token_time(self) -> float:
        """Wall clock time of the first token."""
        return self.arrival_time + self.first_token_ts

    @property
    def last_token_time(self) -> float:
        """Wall clock time of the last token."""
        return self.arrival_time + self.last_token_ts

    finished_time = last_token_time


def _drop_unknown_fields(record: type[_Record]) -> type[_Record]:
    """Make a dataclass drop arguments for which it has no field, with a warning."""
    made: Any = record
    make, known = made.__init__, {entry.name for entry in fields(made)}

    @wraps(make)
    def init(self: _Record, *args: Any, **given: Any) -> None:
        for name in given.keys() - known:
            warnings.warn(f"{record.__name__}: {name} has no effect in batchinfer", stacklevel=2)
            del given[name]
        make(self, *args, **given)

    made.__init__ = init
    return record


@_drop_unknown_fields
@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its samples, or the ``error`` of a prompt that could not run.

    A program may create an object with fields of later vLLM versions, which are dropped with a
    warning.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    """Log-probabilities of each prompt token if requested; None for the first token."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    error: RowError | None = None
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    """The call's ``lora_request`` for this prompt."""
    prompt_token_id_logprobs: Float32 | None = field(default=None, compare=False)
    """Log-probabilities [tokens, ids] of ``prompt_logprob_token_ids``, if given. Row i belongs to
    prompt token ``prompt_logprob_start + i + 1``; padding has -inf."""


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A beam in vLLM's format, together with its prompt."""

    tokens: list[int]
    """Tokens of the prompt and the beam, without the end-of-sequence token unless
    ``include_stop_str_in_output`` keeps it."""
    cum_logprob: float
    """Sum of log-probabilities over the beam's tokens, including the end-of-sequence token."""
    text: str | None
    """Text of ``tokens``; None without a tokenizer."""
    finish_reason: str | None
    stop_reason: int | str | None
    lora_request: LoRARequest | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Empty. ``LLM.generate`` with ``beam_width`` and ``logprobs`` returns log-probabilities."""


@dataclass(frozen=True, slots=True)
class BeamSearchOutput(RequestOutput):
    """A prompt and its beams, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
    """The beams of ``outputs`` in vLLM's format."""


@dataclass(slots=True)
class PromptRequest:
    """A prompt of a call, with its parameters and its adapter."""

    prompt: Prompt | RowError
    params: SamplingParams
    adapter: int
    lora_request: LoRARequest | None
    """The call's ``lora_request`` for this prompt."""
    tools: RowTools | None = None
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt, once they are loaded."""
    request_id: str = ""
    arrival_time: float = 0.0
    """Wall clock time of the call."""


def refused(item: PromptRequest, error: RowError) -> RequestOutput:
    """Return the output of a prompt that never ran."""
    text: str | None = None
    token_ids: list[int] = []
    if isinstance(item.prompt, Prompt):
        text, token_ids = item.prompt.text, item.prompt.vocabulary_ids.tolist()
    return RequestOutput(
        request_id=item.request_id,
        prompt=text,
        prompt_token_ids=token_ids,
        prompt_logprobs=None,
        finished=True,
        outputs=[],
        error=error,
        metrics=_metrics(item, RequestStats(), 0),
        lora_request=item.lora_request,
    )


def finished(item: PromptRequest, completion: Completion, answers: AnswerReader) -> RequestOutput:
    """Return the output of a prompt that the engine has finished."""
    assert isinstance(item.prompt, Prompt)
    request, params = completion.request, item.params
    samples = [_sample(sample, request, item, answers) for sample in completion.outputs]
    ids = request.prompt_token_ids
    if item.prompt.images or item.prompt.embeds is not None:
        ids = item.prompt.vocabulary_ids[-len(ids) :]
    prompt_ids, scored = ids.tolist(), completion.prompt_token_logprobs()
    logprobs = None
    if scored is not None and params.prompt_logprobs is not None:
        decoder = answers.tokenizer if params.detokenize else None
        logprobs = prompt_logprobs(scored, prompt_ids, decoder, flat=params.flat_logprobs)
    error = None
    if completion.error_code is not None:
        error = RowError(completion.error_code, completion.error_message or "")
    return RequestOutput(
        request_id=item.request_id,
        prompt=item.prompt.text,
        prompt_token_ids=prompt_ids,
        prompt_logprobs=logprobs,
        outputs=samples,
        finished=True,
        num_cached_tokens=completion.stats.cached_tokens,
        error=error,
        metrics=_metrics(item, completion.stats, sum(len(one.token_ids) for one in samples)),
        lora_request=item.lora_request,
        prompt_token_id_logprobs=_named_prompt_logprobs(completion, params),
    )


def _metrics(item: PromptRequest, stats: RequestStats, num_tokens: int) -> RequestMetrics:
    scheduled = stats.queue_ms / 1e3
    first = scheduled + stats.prefill_ms / 1e3
    last = max(stats.latency_ms / 1e3, first)
    return RequestMetrics(item.arrival_time, 0.0, scheduled, first, last, num_tokens)


def _named_prompt_logprobs(completion: Completion, params: SamplingParams) -> Float32 | None:
    table, logprobs = params.prompt_logprob_token_ids, completion.prompt_logprobs
    if table is None or logprobs is None or logprobs.named_logprobs is None:
        return None
    return logprobs.named_logprobs[len(logprobs.named_logprobs) - len(table) :]


def _sample(
    sample: SampleOutput, request: Request, item: PromptRequest, answers: AnswerReader
) -> CompletionOutput:
    answer, decoder = Answer(""), None
    if item.params.detokenize:
        tools = None if item.tools is None else item.tools.tools
        answer = answers.read(request.prompt_token_ids, sample, request.params, tools)
        decoder = answers.tokenizer
    token_ids, logprobs = sample.token_ids.tolist(), None
    if sample.logprobs is not None:
        end = request.prompt_token_ids[-MAX_CHAR_TOKENS:]
        text = end[end >= 0].tolist() + token_ids  # drop negative ids, which are images
        flat = item.params.flat_logprobs
        logprobs = output_logprobs(sample.logprobs, text, decoder, flat=flat)
    is_plain = sample.logprobs is None and sample.score is None
    return CompletionOutput(
        index=sample.index,
        text=answer.text,
        token_ids=token_ids,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        cumulative_logprob=None if is_plain else sample.cumulative_logprob,
        logprobs=logprobs,
        score=sample.score,
        reasoning=answer.reasoning,
        num_reasoning_tokens=answer.num_reasoning_tokens,
        tool_calls=answer.tool_calls,
    )


def beam_search_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """Return the output of a beam search, with ``sequences``."""
    sequences = []
    for beam in output.outputs:
        assert beam.cumulative_logprob is not None
        stopped, text = beam.finish_reason == "stop", None
        drops_end = stopped and not params.include_stop_str_in_output
        tokens = output.prompt_token_ids + beam.token_ids[: -1 if drops_end else None]
        if tokenizer is not None:
            text = tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                cum_logprob=beam.cumulative_logprob,
                text=text,
                finish_reason=beam.finish_reason,
                stop_reason=beam.token_ids[-1] if stopped else beam.stop_reason,
                lora_request=output.lora_request,
            )
        )
    values = {entry.name: getattr(output, entry.name) for entry in fields(RequestOutput)}
    return BeamSearchOutput(**values, sequences=sequences)


class Stats(dict[str, dict[str, float]]):
    """``tokens``, ``throughput`` and ``kv`` of ``summary.json``; notebooks show it as a table."""

    def __repr__(self) -> str:
        lines: list[str] = []
        for section, values in self.items():
            lines.append(section)
            lines += [f"  {name:<22}{_shown(name, n):>14}" for name, n in values.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        left, rows = "style='text-align:left'", list[str]()
        for section, values in self.items():
            rows.append(f"<tr><th colspan=2 {left}>{escape(section)}</th></tr>")
            for name, n in values.items():
                rows.append(f"<tr><td {left}>{escape(name)}</td><td>{_shown(name, n)}</td></tr>")
        return f"<table>{''.join(rows)}</table>"


def _shown(name: str, value: float) -> str:
    if "per_s" in name:
        return f"{value:,.1f}"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
