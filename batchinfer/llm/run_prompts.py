"""Runs the prompts of a call: turns them into requests, and completions into outputs."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchinfer.builders.context import EngineContext
from batchinfer.config.call_params import SamplingParams
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.step import LogprobsMode
from batchinfer.errors import RowError
from batchinfer.llm.images import CallImages
from batchinfer.llm.outputs import PromptRequest, RequestOutput, finished, refused
from batchinfer.llm.params import as_called, rows_to_score_problem
from batchinfer.llm.run_requests import OnError, ProgressBar, RequestRunner
from batchinfer.requests.requests import PromptRow, RequestMaker, RowSampling
from batchinfer.requests.resampling import Resampling
from batchinfer.requests.tool_choice import ToolChoices
from batchinfer.text.answers import AnswerReader
from batchinfer.text.prompts import Prompt
from batchinfer.text.reasoning.reasoning_format import ReasoningFormat
from batchinfer.text.structured.compiled_grammar import GrammarCompiler
from batchinfer.text.structured.grammar_source import GrammarError
from batchinfer.text.structured.json_validator import SchemaError
from batchinfer.text.tools.tool_format import ToolFormat


class CallRunner:
    """Runs the prompts of calls.

    Args:
        seed: seed for samples whose parameters set no seed; each call derives another seed from it.
            None: a random seed for every call.
        reasoning: format of the model's reasoning; None if reasoning stays in the text.
        tool_format: format of the model's tool calls; None if calls stay in the text.
        mode: values to return as log-probabilities (``LLM(logprobs_mode=...)``); beam search always
            returns the log-probabilities that it adds up.
        images: loads the images of prompts; None if the model takes only text.
    """

    def __init__(
        self,
        context: EngineContext,
        calls: RequestRunner,
        seed: int | None,
        reasoning: ReasoningFormat | None = None,
        tool_format: ToolFormat | None = None,
        mode: LogprobsMode = LogprobsMode.RAW,
        images: CallImages | None = None,
    ) -> None:
        self._context = context
        self._calls = calls
        self._engine = context.engine
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._reasoning = reasoning
        self._mode = mode
        self._images = images
        tokenizer, ends, size = context.tokenizer, context.eos_token_ids, context.vocab_size
        grammars = GrammarCompiler(tokenizer, ends, size)
        self._answers = AnswerReader(tokenizer, reasoning, tool_format)
        maker = RequestMaker(tokenizer, ends, grammars, reasoning, size)
        self._samples = Resampling(maker, self._answers)
        self._tool_choices = None
        if tool_format is not None:
            self._tool_choices = ToolChoices(tool_format, tokenizer, grammars)
        self._num_requests = 0

    @property
    def reads_tools(self) -> bool:
        """True if the format of the model's tool calls is known."""
        return self._tool_choices is not None

    def run(
        self, items: Sequence[PromptRequest], on_error: OnError, use_tqdm: ProgressBar
    ) -> list[RequestOutput]:
        """Return the output of each prompt.

        Raises:
            ValueError: a prompt cannot run, and ``on_error`` is ``raise``. In this case, no prompt
                has run.
        """
        seed, now = self._random.getrandbits(64), time.time()
        sampling: dict[tuple[int, int | None], RowSampling] = {}
        rows: dict[int, PromptRow] = {}
        requests: list[Request] = []
        outputs: dict[int, RequestOutput] = {}
        if self._images is not None:
            self._images.load(items)
        for at, item in enumerate(items):
            item.request_id, item.arrival_time = str(self._num_requests + at), now
            try:
                rows[at] = self._row(at, item, seed, sampling)
                requests += self._first_requests(rows[at], item.params)
            except RowError as error:
                if on_error == "raise":
                    raise ValueError(f"prompt {at}: {error.message}") from None
                # A new error, because ``error`` keeps the frames of its traceback in memory.
                outputs[at] = refused(item, RowError(error.code, error.message))
        if self._context.warm_up is not None:  # compiles the sampling kernels of the steps
            distinct = {id(row.sampling): row.sampling for row in rows.values() if row.sampling}
            self._context.warm_up(sampled.params for sampled in distinct.values())
        finished_samples: dict[int, list[Completion]] = {}
        with self._calls.completions(requests, len(items), use_tqdm) as (completions, meter, bar):
            bar.update(len(outputs))
            for completion in completions:
                at = completion.request.row_id
                parts = finished_samples.setdefault(at, [])
                parts.append(completion)
                if further := self._samples.follow_up_requests(rows[at], parts):
                    self._calls.add(self._as_called(further, items[at].params))
                    continue
                whole, _ = self._samples.result(rows[at], finished_samples.pop(at))
                outputs[at] = finished(items[at], whole, self._answers)
                bar.set_postfix_str(meter.rates, refresh=False)
                bar.update()
        self._num_requests += len(items)
        return [outputs[at] for at in range(len(items))]

    def _row(
        self,
        at: int,
        item: PromptRequest,
        seed: int,
        made: dict[tuple[int, int | None], RowSampling],
    ) -> PromptRow:
        """Return the row of a prompt.

        Args:
            made: sampling of earlier rows, keyed by their parameters and, if ``max_tokens`` is
                None, the prompt's length. Most calls have the same parameters for all rows, and
                checking parameters takes 0.1 ms.

        Raises:
            RowError: the prompt or its parameters cannot be run.
        """
        if isinstance(item.prompt, RowError):
            raise item.prompt
        longest, params = self._engine.max_model_len, item.params
        prompt = _truncated(item.prompt, params.truncate_prompt_tokens, longest)
        length = len(prompt.token_ids)
        key = (id(params), length if params.max_tokens is None else None)
        if key not in made:
            try:
                resolved = params.resolved(length, longest, self._context.vocab_size)
            except ValueError as error:
                raise RowError("bad_sampling_params", str(error)) from None
            own_seed = resolved.seed is not None
            if not own_seed:
                resolved = replace(resolved, seed=seed)
            made[key] = RowSampling(resolved, own_seed)
        sampling: RowSampling | RowError | None = made[key]
        if self._tool_choices is not None:
            sampling = self._tool_choices.applied(sampling, item.tools)
        if isinstance(sampling, RowError):
            raise sampling
        return PromptRow(at, prompt, sampling, adapter=item.adapter, images=item.images)

    def _first_requests(self, row: PromptRow, params: SamplingParams) -> Sequence[Request]:
        """Return the requests that a row starts with.

        Raises:
            RowError: the row cannot run.
        """
        assert isinstance(row.prompt, Prompt)
        assert row.sampling is not None
        length = len(row.prompt.token_ids)
        if length == 0:
            message = "the decoder prompt cannot be empty: it has no tokens"
            raise RowError("empty_prompt", message)
        if row.sampling.params.max_reasoning_tokens is not None and self._reasoning is None:
            problem = (
                'max_reasoning_tokens needs LLM(reasoning="auto"), or reasoning with '
                "the model's markers"
            )
            raise RowError("bad_sampling_params", problem)
        if (misfit := rows_to_score_problem(params, length)) is not None:
            raise RowError("bad_sampling_params", misfit)
        try:
            requests = self._samples.requests(row)
        except (GrammarError, SchemaError) as error:
            message = f"structured_outputs: {error}"
            raise RowError("invalid_structured_output", message) from None
        for request in requests:
            if (refusal := self._engine.refusal(request)) is not None:
                code, message = refusal
                is_long = code == "prompt_too_long"
                raise RowError(code, self._too_long_message(length) if is_long else message)
        return self._as_called(requests, params)

    def _as_called(self, requests: Sequence[Request], params: SamplingParams) -> Sequence[Request]:
        return as_called(requests, params, self._mode)

    def _too_long_message(self, length: int) -> str:
        """Return an error message in vLLM's wording (vllm/v1/engine/input_processor.py), because
        programs search for this wording."""
        most = self._engine.max_model_len
        return (
            f"The decoder prompt (length {length}) plus the number of requested output tokens (at "
            f"least 1) is longer than the maximum model length of {most}. Make sure that "
            "`max_model_len` is no smaller than the number of text tokens (prompt + requested "
            f"output tokens). The maximum context length is {most} tokens, output included. "
            "Please reduce the length of the prompt, or give a larger max_model_len"
        )


def _truncated(prompt: Prompt, kept: int | None, max_model_len: int) -> Prompt:
    """Return the prompt with only its last ``kept`` tokens (``truncate_prompt_tokens``).

    Raises:
        RowError: ``kept`` is more than ``max_model_len``, or the prompt is too long and has images.
    """
    if kept is None:
        return prompt
    if kept > max_model_len:
        problem = (
            f"truncate_prompt_tokens is {kept}; it must be at most max_model_len, "
            f"which is {max_model_len}"
        )
        raise RowError("bad_sampling_params", problem)
    most = max_model_len - 1 if kept == -1 else kept
    if len(prompt.token_ids) <= most:
        return prompt
    if prompt.images:
        raise RowError("prompt_too_long", "truncate_prompt_tokens cannot cut a prompt with images")
    embeds = None if prompt.embeds is None else prompt.embeds[-most:]
    token_ids = np.ascontiguousarray(prompt.token_ids[-most:])
    return replace(prompt, token_ids=token_ids, embeds=embeds, truncated=True)
