"""A call's prompts to requests of the engine, and what it makes of them to outputs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from tqdm.auto import tqdm

from batchinfer.builders.context import EngineContext
from batchinfer.config.call_params import SamplingParams
from batchinfer.console.meter import Meter
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.step import LogprobsMode
from batchinfer.errors import RowError
from batchinfer.llm.calls import Calls
from batchinfer.llm.lora import LoRARequest
from batchinfer.llm.outputs import Asked, RequestOutput, finished, refused
from batchinfer.llm.params import as_called, rows_to_score_problem
from batchinfer.process.process import gc_frozen
from batchinfer.requests.requests import PromptRow, RequestMaker, RowSampling
from batchinfer.requests.resampling import Resampling
from batchinfer.requests.tool_choice import ToolChoices
from batchinfer.text.answers import AnswerReader
from batchinfer.text.grammar import GrammarCompiler
from batchinfer.text.prompts import Prompt
from batchinfer.text.reasoning.reasoning_format import ReasoningFormat
from batchinfer.text.structured.grammar_source import GrammarError
from batchinfer.text.structured.json_validator import SchemaError
from batchinfer.text.tools.row_tools import RowTools
from batchinfer.text.tools.tool_format import ToolFormat

OnError = Literal["raise", "return"]
"""What becomes of a prompt that cannot be run: the call raises, or its output has an ``error``."""
_TOO_LONG = "prompt_too_long"
ProgressBar = bool | Callable[..., Any]
"""Whether to show a bar, or what makes one: called as tqdm's class is."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt of a call and all that is asked of it."""

    prompt: Prompt | RowError
    params: SamplingParams
    adapter: int
    lora_request: LoRARequest | None
    """As the call gave it."""
    tools: RowTools | None = None
    """What the model may call, or must."""


class CallRunner:
    """Runs the prompts of one call after the other.

    Args:
        seed: what samples without a seed of their own depend on, with the number of the call;
            None: they are fresh in every call.
        reasoning: how the model marks its thinking; None: it is part of the text.
        tool_format: how it writes calls of tools; None: they are part of the text.
        mode: what is given as log-probabilities; beams are ranked by these themselves.
    """

    def __init__(
        self,
        context: EngineContext,
        calls: Calls,
        seed: int | None,
        reasoning: ReasoningFormat | None = None,
        tool_format: ToolFormat | None = None,
        mode: LogprobsMode = LogprobsMode.RAW,
    ) -> None:
        self._context = context
        self._calls = calls
        self._engine = context.engine
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        facts = context.tokenizer, context.eos_token_ids
        grammars = GrammarCompiler(*facts, context.vocab_size)
        self._reasoning = reasoning
        self._mode = mode
        self._answers = AnswerReader(context.tokenizer, reasoning, tool_format)
        maker = RequestMaker(*facts, grammars, reasoning, context.vocab_size)
        self._samples = Resampling(maker, self._answers)
        self._tool_choices = None
        if tool_format is not None:
            self._tool_choices = ToolChoices(tool_format, context.tokenizer, grammars)
        self._num_requests = 0

    @property
    def reads_tools(self) -> bool:
        """Whether it is known how the model writes calls of tools."""
        return self._tool_choices is not None

    def run(
        self, items: Sequence[PromptRequest], on_error: OnError, use_tqdm: ProgressBar
    ) -> list[RequestOutput]:
        """The output of each prompt.

        Raises:
            ValueError: one cannot be run, and ``on_error`` is ``raise``; before any is.
        """
        seed, now = self._random.getrandbits(64), time.time()
        made: dict[tuple[int, int | None], RowSampling] = {}
        rows = [self._row(at, item, seed, made) for at, item in enumerate(items)]
        requests, errors = self._requests(rows, items)
        if errors and on_error == "raise":
            first = min(errors)
            raise ValueError(f"prompt {first}: {errors[first].message}")
        asked = [
            Asked(
                *(str(self._num_requests + at), item.params, item.lora_request, now),
                None if item.tools is None else item.tools.tools,
            )
            for at, item in enumerate(items)
        ]
        outputs = {at: refused(asked[at], error, rows[at].prompt) for at, error in errors.items()}
        parts: dict[int, list[Completion]] = {}
        self._warm_up(rows)
        meter = Meter(len(rows))
        with (
            progress(len(rows), use_tqdm) as bar,
            closing(self._calls.run(requests, meter)) as completions,
            gc_frozen(),
        ):
            bar.update(len(outputs))
            for completion in completions:
                at = completion.request.row_id
                parts.setdefault(at, []).append(completion)
                if further := self._samples.follow_up_requests(rows[at], parts[at]):
                    self._calls.add(self._as_called(further, items[at].params))
                    continue
                whole, _ = self._samples.result(rows[at], parts.pop(at))
                prompt = rows[at].prompt
                assert isinstance(prompt, Prompt)
                outputs[at] = finished(asked[at], whole, prompt, self._answers)
                bar.set_postfix_str(meter.rates, refresh=False)
                bar.update()
        self._num_requests += len(rows)
        return [outputs[at] for at in range(len(rows))]

    def _row(
        self,
        at: int,
        item: PromptRequest,
        seed: int,
        made: dict[tuple[int, int | None], RowSampling],
    ) -> PromptRow:
        """The row of a prompt.

        Args:
            made: sampling of the rows before, by their parameters and, where these depend on it,
                the prompt's length: most often a call has one for all, and checking takes 0.1 ms.
        """
        if isinstance(item.prompt, RowError):
            return PromptRow(at, item.prompt)
        longest = self._engine.max_model_len
        prompt = truncated(item.prompt, item.params.truncate_prompt_tokens, longest)
        length = len(prompt.token_ids)
        key = (id(item.params), length if item.params.max_tokens is None else None)
        if key not in made:
            try:
                params = item.params.resolved(length, longest, self._context.vocab_size)
            except ValueError as error:
                return PromptRow(at, RowError("bad_sampling_params", str(error)))
            own_seed = params.seed is not None
            made[key] = RowSampling(params if own_seed else replace(params, seed=seed), own_seed)
        sampling: RowSampling | RowError | None = made[key]
        if self._tool_choices is not None:
            sampling = self._tool_choices.applied(sampling, item.tools)
        if isinstance(sampling, RowError):
            return PromptRow(at, sampling)
        return PromptRow(at, prompt, sampling, adapter=item.adapter)

    def _requests(
        self, rows: Sequence[PromptRow], items: Sequence[PromptRequest]
    ) -> tuple[list[Request], dict[int, RowError]]:
        """The first requests of the rows that can run, and the errors of the others."""
        requests: list[Request] = []
        errors: dict[int, RowError] = {}
        for row, item in zip(rows, items, strict=True):
            found = self._first_requests(row, item.params)
            if isinstance(found, RowError):
                errors[row.row_id] = found
            else:
                requests += self._as_called(found, item.params)
        return requests, errors

    def _warm_up(self, rows: Sequence[PromptRow]) -> None:
        """Compile what the call's steps draw by, before the first of them; once for calls alike."""
        if self._context.warm_up is not None:
            each = {id(row.sampling): row.sampling.params for row in rows if row.sampling}
            self._context.warm_up(each.values())

    def _as_called(self, requests: Sequence[Request], params: SamplingParams) -> list[Request]:
        mode = LogprobsMode.RAW if params.beam_width else self._mode
        return as_called(requests, params, mode)

    def _first_requests(self, row: PromptRow, params: SamplingParams) -> list[Request] | RowError:
        if isinstance(row.prompt, RowError):
            return row.prompt
        if len(row.prompt.token_ids) == 0:
            return RowError("empty_prompt", "the decoder prompt cannot be empty: it has no tokens")
        assert row.sampling is not None
        if row.sampling.params.max_reasoning_tokens is not None and self._reasoning is None:
            problem = 'max_reasoning_tokens needs LLM(reasoning="auto"), or the markers'
            return RowError("bad_sampling_params", problem)
        if (misfit := rows_to_score_problem(params, len(row.prompt.token_ids))) is not None:
            return RowError("bad_sampling_params", misfit)
        try:
            requests = self._samples.requests(row)
        except (GrammarError, SchemaError) as error:
            return RowError("invalid_structured_output", f"structured_outputs: {error}")
        for request in requests:
            refusal = self._engine.refusal(request)
            if refusal is not None:
                code, message = refusal
                return RowError(code, self._too_long(row.prompt) if code == _TOO_LONG else message)
        return requests

    def _too_long(self, prompt: Prompt) -> str:
        """In words that programs made for vLLM look for (vllm/v1/engine/input_processor.py)."""
        length, most = len(prompt.token_ids), self._engine.max_model_len
        return (
            f"The decoder prompt (length {length}) plus the number of requested output tokens (at "
            f"least 1) is longer than the maximum model length of {most}. Make sure that "
            "`max_model_len` is no smaller than the number of text tokens (prompt + requested "
            f"output tokens). The maximum context length is {most} tokens, output included. "
            "Please reduce the length of the prompt, or give a larger max_model_len"
        )


def truncated(prompt: Prompt, kept: int | None, max_model_len: int) -> Prompt:
    """The prompt with as many of its last tokens as ``truncate_prompt_tokens`` keeps."""
    if kept is None:
        return prompt
    if kept > max_model_len:
        raise ValueError(
            f"truncate_prompt_tokens is {kept}, more than max_model_len, which is {max_model_len}"
        )
    most = max_model_len - 1 if kept == -1 else kept
    if len(prompt.token_ids) <= most:
        return prompt
    return replace(prompt, token_ids=np.ascontiguousarray(prompt.token_ids[-most:]), truncated=True)


@contextmanager
def progress(count: int, use_tqdm: ProgressBar) -> Iterator[Any]:
    """A progress bar over ``count`` prompts."""
    if callable(use_tqdm):
        bar = use_tqdm(total=count, desc="prompts", dynamic_ncols=True)
    else:
        bar = tqdm(total=count, disable=not use_tqdm, unit=" prompts")
    try:
        yield bar
    finally:
        bar.close()
