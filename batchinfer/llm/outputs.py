"""Results of the Python API: outputs made of completions, and ``LLM.stats`` as a table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from html import escape

from batchinfer.config.call_params import SamplingParams
from batchinfer.engine.request import (
    Completion,
    Request,
    RequestStats,
    SampleOutput,
)
from batchinfer.engine.step import Float32
from batchinfer.errors import RowError
from batchinfer.llm.compatibility import takes_unknown_fields
from batchinfer.llm.logprobs import Logprobs, PromptLogprobs, output_logprobs, prompt_logprobs
from batchinfer.llm.lora import LoRARequest
from batchinfer.llm.vllm.request_metrics import RequestMetrics, request_metrics
from batchinfer.text.answers import Answer, AnswerReader
from batchinfer.text.detokenize import MAX_CHAR_TOKENS
from batchinfer.text.prompts import Prompt
from batchinfer.text.tools.tool_format import ToolCall, Tools


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
    """Of all its tokens; None where no log-probabilities are asked for, but for beams."""
    logprobs: Logprobs | None = None
    score: float | None = None
    """What beams are ranked by; None without beam search."""
    reasoning: str | None = None
    """With ``LLM(reasoning=...)``: what the model thought, which ``text`` is then without."""
    num_reasoning_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    """With ``LLM(tool_parser=...)``: calls of the tools that ``chat`` was given, which ``text`` is
    then without; each has a ``name`` and ``arguments``, JSON text."""


@takes_unknown_fields
@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its samples. A prompt that could not be run has none, and an ``error``.

    Made with names that later versions of vLLM may have, it warns of each and goes without.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    """Each prompt token's, if asked for; None for the first, which nothing comes before."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    error: RowError | None = None
    metrics: RequestMetrics | None = None
    """When it came, began and ended."""
    lora_request: LoRARequest | None = None
    """As the call gave it."""
    prompt_token_id_logprobs: Float32 | None = field(default=None, compare=False)
    """[tokens, ids] of ``prompt_logprob_token_ids``, where these are given: row i is of prompt
    token ``prompt_logprob_start + i + 1``; -inf where there is no id."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an output repeats of the call that asked for it."""

    request_id: str
    params: SamplingParams
    lora_request: LoRARequest | None
    arrival_time: float
    """Of the call, by the wall clock."""
    tools: Tools | None = None
    """What the model may call."""


def refused(asked: Asked, error: RowError, prompt: Prompt | RowError) -> RequestOutput:
    """The output of a prompt that never ran."""
    text: str | None = None
    token_ids: list[int] = []
    if isinstance(prompt, Prompt):
        text, token_ids = prompt.text, prompt.token_ids.tolist()
    return RequestOutput(
        request_id=asked.request_id,
        prompt=text,
        prompt_token_ids=token_ids,
        prompt_logprobs=None,
        num_cached_tokens=0,
        finished=True,
        outputs=[],
        error=error,
        metrics=request_metrics(asked.arrival_time, RequestStats(), 0),
        lora_request=asked.lora_request,
    )


def finished(
    asked: Asked, completion: Completion, prompt: Prompt, answers: AnswerReader
) -> RequestOutput:
    """The output of a prompt that the engine is done with."""
    request = completion.request
    reader = answers if asked.params.detokenize else None
    decoder = answers.tokenizer if asked.params.detokenize else None
    samples = [_sample(sample, request, reader, asked) for sample in completion.outputs]
    prompt_ids, prompt_tokens = (
        request.prompt_token_ids.tolist(),
        completion.prompt_token_logprobs(),
    )
    flat = asked.params.flat_logprobs
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    output = RequestOutput(
        request_id=asked.request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt_ids,
        prompt_logprobs=None
        if prompt_tokens is None or asked.params.prompt_logprobs is None
        else prompt_logprobs(prompt_tokens, prompt_ids, decoder, flat=flat),
        num_cached_tokens=completion.stats.cached_tokens,
        finished=True,
        outputs=samples,
        metrics=request_metrics(asked.arrival_time, completion.stats, num_tokens),
        lora_request=asked.lora_request,
        prompt_token_id_logprobs=_named_prompt_logprobs(completion, asked.params),
    )
    if completion.error_code is None:
        return output
    return replace(output, error=RowError(completion.error_code, completion.error_message or ""))


def _named_prompt_logprobs(completion: Completion, params: SamplingParams) -> Float32 | None:
    table, found = params.prompt_logprob_token_ids, completion.prompt_logprobs
    if table is None or found is None or found.named_logprobs is None:
        return None
    return found.named_logprobs[len(found.named_logprobs) - len(table) :]


def _sample(
    sample: SampleOutput, request: Request, answers: AnswerReader | None, asked: Asked
) -> CompletionOutput:
    answer = Answer("")
    if answers is not None:
        answer = answers.read(request.prompt_token_ids, sample, request.params, asked.tools)
    token_ids = sample.token_ids.tolist()
    before = request.prompt_token_ids[-MAX_CHAR_TOKENS:].tolist()
    is_plain = sample.logprobs is None and sample.score is None
    return CompletionOutput(
        index=sample.index,
        text=answer.text,
        token_ids=token_ids,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        cumulative_logprob=None if is_plain else sample.cumulative_logprob,
        logprobs=None
        if sample.logprobs is None
        else output_logprobs(
            sample.logprobs,
            before + token_ids,
            None if answers is None else answers.tokenizer,
            flat=asked.params.flat_logprobs,
        ),
        score=sample.score,
        reasoning=answer.reasoning,
        num_reasoning_tokens=answer.num_reasoning_tokens,
        tool_calls=answer.tool_calls,
    )


class Stats(dict[str, dict[str, float]]):
    """``tokens``, ``throughput`` and ``kv`` of ``summary.json``; in a notebook, a table."""

    def __repr__(self) -> str:
        lines: list[str] = []
        for section, values in self.items():
            lines += [section, *(f"  {name:<22}{_said(name, n):>14}" for name, n in values.items())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The stats as a table, for notebooks."""
        rows = "".join(
            f"<tr><th colspan=2 style='text-align:left'>{escape(section)}</th></tr>"
            + "".join(
                f"<tr><td style='text-align:left'>{escape(name)}</td><td>{_said(name, n)}</td></tr>"
                for name, n in values.items()
            )
            for section, values in self.items()
        )
        return f"<table>{rows}</table>"


def _said(name: str, value: float) -> str:
    if "per_s" in name:
        return f"{value:,.1f}"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
