"""A model, loaded once, and the calls that run it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.build import build_engine
from batchinfer.config import PromptConfig, sampling
from batchinfer.config.beam_params import BeamSearchParams
from batchinfer.config.call_params import SamplingParams
from batchinfer.errors import NotYetError, RowError
from batchinfer.llm.arguments import (
    FIT,
    engine_config,
    model_config,
    reasoning_asked,
    schema_defaults,
    template_text,
)
from batchinfer.llm.beam_outputs import BeamSearchOutput, beam_search_output
from batchinfer.llm.calls import Calls, OneCall
from batchinfer.llm.compatibility import missing_attribute, settle
from batchinfer.llm.defaults import default_sampling_params
from batchinfer.llm.lora import Adapters, LoRARequest, requests_of_each
from batchinfer.llm.outputs import RequestOutput, Stats
from batchinfer.llm.pooling.calls import PoolingCalls
from batchinfer.llm.pooling.choose import choose_runner, classifier_tokens, refused_calls
from batchinfer.llm.pooling.runner import PoolingRunner
from batchinfer.llm.prompts import (
    Conversation,
    PromptLike,
    check_priority,
    final_message,
    kind_of,
    params_of_each,
    read_conversations,
    read_prompts,
)
from batchinfer.llm.run import CallRunner, OnError, ProgressBar, PromptRequest
from batchinfer.llm.vllm.engine_view import EngineView, ModelView, engine_view
from batchinfer.llm.vllm.metrics import Metric, read_metrics
from batchinfer.report.sanitize import without_secrets
from batchinfer.report.write import check_installed
from batchinfer.text.children.pool import ChildPrompts, TextProcesses
from batchinfer.text.prompts import Prompt, PromptBuilder, RawTexts
from batchinfer.text.reasoning.formats import find_reasoning_format
from batchinfer.text.tokenizer import no_tokenizer
from batchinfer.text.tools.formats import find_tool_format
from batchinfer.text.tools.row_tools import checked_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger("batchinfer.llm")
_ANY_LENGTH = 2**31
"""Of conversations written out: the engine says which are too long."""
_KNOWN = ("sampling_params", "adapter", "lora_request", "use_tqdm", "errors")


class LLM(PoolingCalls):
    """A model, loaded once and run on as many prompts as are given.

    Calls may come from several threads: one runs at a time, the others wait for it. Give all
    prompts in one call where you can; that is what the engine is fast at.

    Args:
        model: hub id or local directory.
        tokenizer: hub id or directory of another tokenizer; default the model's.
        skip_tokenizer_init: take and give token ids only; the tokenizer's files are not read.
        revision: of a model on the hub; a tokenizer of its own is its repository's latest.
        dtype: ``auto`` (as saved), ``float32`` (``float``), ``bfloat16`` or ``float16``
            (``half``), or torch's.
        max_model_len: longest prompt and output together; default what the model allows, -1 what
            of that the KV pool has room for.
        max_logprobs: most alternatives that ``logprobs`` and ``prompt_logprobs`` may ask for; -1
            any number; default 20, or by -1 all.
        seed: what samples without a seed of their own depend on, with the number of the call;
            default: they are fresh in every call.
        quantization: ``int8``, ``int4``, ``fp8``, ``int8_weight_only`` or
            ``int4_weight_only``; default as saved.
        adapters: LoRA adapters as peft saves them: folder or hub id by name.
        enable_lora: calls may bring adapters of their own, as ``LoRARequest``, which are loaded
            when they are first asked for.
        generation_config: where ``get_default_sampling_params`` are from: ``auto`` the model's
            folder, ``vllm`` nowhere, or another folder.
        override_generation_config: keys of ``generation_config.json``, which win.
        structured_outputs_config: vLLM's, or a dict; ``disable_any_whitespace`` and
            ``disable_additional_properties`` are for schemas that say nothing of these.
        guided_decoding_disable_any_whitespace: the same, by its earlier name.
        reasoning: splits what the model thinks from its ``text``, in all outputs: ``auto`` by the
            markers of its chat template, or ``{"start": text, "end": text}``.
        reasoning_parser: the same, by vLLM's name of the format, like ``qwen3``.
        tool_parser: reads calls of the tools that ``chat`` is given: ``auto``, by the chat
            template, or vLLM's name of the format, like ``hermes``; ``none``: they stay in the
            text.
        chat_template: of chats that give none: the text of a template (Jinja2), or its file;
            default the model's.
        runner: ``generate``, to write text; ``pooling``, for ``embed``, ``classify`` and ``score``
            alone; ``auto``: as the model's class says.
        task: the same, by its earlier name: ``generate``, ``embed``, ``classify`` or ``score``.
        hf_overrides: ``classifier_from_token``, what a reranker answers with: ``["no", "yes"]``.
        tensor_parallel_size: accepted for compatibility; must be 1.
        engine_keys: keys of the job file's ``engine`` section, e.g. ``block_size=32``, and vLLM's
            arguments that have no effect here, which are warned of.

    Raises:
        ModelError: the model cannot be loaded or run.
        DeviceError: the device is missing or too small.
        NotYetError: an argument is known, and not built yet.
        TypeError: an argument is unknown or of another type.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        dtype: Any = "auto",
        max_model_len: int | None = None,
        max_logprobs: int | None = None,
        seed: int | None = None,
        quantization: str | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        enable_lora: bool = False,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        structured_outputs_config: Any = None,
        guided_decoding_disable_any_whitespace: bool | None = None,
        reasoning: str | Mapping[str, str] = "none",
        reasoning_parser: str | None = None,
        tool_parser: str = "none",
        chat_template: str | os.PathLike[str] | None = None,
        runner: str = "auto",
        task: str | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        **engine_keys: Any,
    ) -> None:
        if tensor_parallel_size != 1:
            raise NotYetError(f"LLM(tensor_parallel_size={tensor_parallel_size})")
        engine = engine_config(engine_keys)
        tokens = classifier_tokens(hf_overrides)
        asked_reasoning = reasoning_asked(reasoning, reasoning_parser)
        self._schema_defaults = schema_defaults(
            structured_outputs_config, guided_decoding_disable_any_whitespace
        )
        choice = model_config(
            model,
            tokenizer=tokenizer,
            revision=revision,
            dtype=dtype,
            max_model_len=max_model_len,
            quantization=quantization,
            adapters=adapters or {},
            runner=choose_runner(runner, task, os.fspath(model), revision),
        )
        self._max_logprobs = max_logprobs
        self._chat_template = template_text(chat_template)
        self._has_tokenizer = not skip_tokenizer_init
        # A revision is one of the model's repository.
        self._source = (choice.tokenizer, None) if choice.tokenizer else (choice.name, revision)
        self._generation_config = (
            *(choice.name, revision, generation_config),
            dict(override_generation_config or {}),
        )
        self._processes = TextProcesses()  # they start while the model is loaded
        self._context = build_engine(
            choice,
            engine,
            log=_LOG.info,
            tokenizer=None if self._has_tokenizer else no_tokenizer(),
            fit_length=max_model_len == FIT,
            more_adapters=enable_lora,
        )
        self._processes.load(self._context.tokenizer)
        self._adapters = Adapters(choice.adapters, self._context)
        self._view = engine_view(choice, engine, self._context)
        self._settings = without_secrets({"model": asdict(choice), "engine": asdict(engine)})
        self._calls = Calls(self._context)
        self._runner = CallRunner(
            *(self._context, self._calls, seed),
            find_reasoning_format(asked_reasoning, self._context.tokenizer),
            find_tool_format(tool_parser, self._context.tokenizer),
        )
        self._pooling = PoolingRunner(choice, self._context, self._calls, tokens)
        self._one_call = OneCall(refused_calls(choice.runner))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(name)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: sampling.SamplingParams | Sequence[sampling.SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        priority: int | Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue prompts. Text is taken raw: no template, special tokens are parsed.

        Args:
            prompts: one or several texts, token id lists, ``{"prompt": ...}`` or
                ``{"prompt_token_ids": ...}``.
            sampling_params: one for all prompts, or one each; default
                ``get_default_sampling_params()``.
            adapter: name of the adapter for all prompts, or one each; None runs the base model.
            lora_request: the same, as vLLM has it.
            use_tqdm: show a progress bar; or what makes it, called as tqdm's class is.
            errors: ``raise``: a prompt that cannot be run ends the call before any is; ``return``:
                its output has an ``error``, and the others are run. What fails while it runs has
                an ``error`` either way.
            priority: without effect.
            others: arguments of vLLM's ``generate`` that are not here: without effect, or refused
                with what to do instead.

        Returns:
            An output for each prompt, in order.

        Raises:
            TypeError, ValueError: an argument is no prompt or no sampling parameters, a token id
                is not the model's, a prompt cannot be run; before anything runs.
            RuntimeError: called from within another call.
            NotYetError: an argument is known, and not built yet.
        """
        settle("LLM.generate", others, (*_KNOWN, "prompts"))
        _check_errors(errors)
        with self._one_call("generate"):
            read = read_prompts(prompts, self.vocab_size, has_tokenizer=self._has_tokenizer)
            check_priority(priority, len(read), "LLM.generate")
            items = self._items(self._prompts(read), sampling_params, adapter, lora_request)
            return self._runner.run(items, errors, use_tqdm)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation] | None = None,
        sampling_params: sampling.SamplingParams | Sequence[sampling.SamplingParams] | None = None,
        *,
        messages: Conversation | Sequence[Conversation] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        priority: int | Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, written out by the model's chat template.

        A conversation that ends with the assistant's words is continued there, unless
        ``add_generation_prompt`` or ``continue_final_message`` say what to do.

        Args:
            messages: vLLM's name of ``conversations``.
            chat_template: the text of another template (Jinja2).
            chat_template_kwargs: further variables of the template.
            add_generation_prompt: open an answer of the assistant, whosever words are the last;
                False: open nothing.
            continue_final_message: go on with the last message.
            tools: what the model may call, as OpenAI defines it; for the template.
            priority: without effect.
            others: as of ``generate``.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError: as ``generate``.
            ModelError: the model has no chat template.
            UsageError: ``chat_template`` is no template.
        """
        settle("LLM.chat", others, (*_KNOWN, "conversations", "chat_template_kwargs"))
        _check_errors(errors)
        given = messages if conversations is None else conversations
        if given is None or (conversations is not None and messages is not None):
            raise TypeError("give conversations, or messages, which is another name for them")
        if not self._has_tokenizer:
            raise ValueError("LLM.chat needs a tokenizer; leave skip_tokenizer_init out")
        if not isinstance(chat_template, str | None):
            raise TypeError(
                f"chat_template is {kind_of(chat_template)}; give the text of a template, or None"
            )
        template = self._chat_template if chat_template is None else chat_template
        rows = [{"messages": item} for item in read_conversations(given)]
        check_priority(priority, len(rows), "LLM.chat")
        callable_tools = (None if tools is None else checked_tools(tools)) or None
        with self._one_call("chat"):
            recipe = partial(
                PromptBuilder,
                PromptConfig(
                    column="messages",
                    chat_template="auto" if template is None else "chat_template",
                    chat_template_kwargs=chat_template_kwargs or {},
                    tools=None if callable_tools is None else tuple(callable_tools),
                ),
                max_model_len=_ANY_LENGTH,
                columns=["messages"],
                conversation_columns=["messages"],
                chat_template_source=template,
                vocab_size=self._context.vocab_size,
                now=datetime.now(),
                final_message=final_message(add_generation_prompt, continue_final_message),
            )
            made = self._processes.prompts(recipe).build(rows)
            items = self._items(made, sampling_params, adapter, lora_request)
            items = [replace(item, tools=callable_tools) for item in items]
            return self._runner.run(items, errors, use_tqdm)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        adapter: str | Sequence[str | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: ProgressBar = False,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """Find likely continuations of prompts, which are taken as by ``generate``.

        Returns:
            An output for each prompt, in order; its ``outputs`` are the ``beam_width`` best
            continuations, best first, each with its ``score``, and its ``sequences`` the same as
            vLLM has them.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError: as ``generate``.
        """
        settle("LLM.beam_search", others, (*_KNOWN, "prompts", "params"))
        _check_errors(errors)
        if not isinstance(params, BeamSearchParams):
            raise TypeError("params must be BeamSearchParams(beam_width=..., max_tokens=...)")
        with self._one_call("beam_search"):
            read = read_prompts(prompts, self.vocab_size, has_tokenizer=self._has_tokenizer)
            items = self._items(self._prompts(read), params.sampling(), adapter, lora_request)
            found = self._runner.run(items, errors, use_tqdm)
            tokenizer = self._context.tokenizer if self._has_tokenizer else None
            return [beam_search_output(output, params, tokenizer) for output in found]

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of calls that give none: what the model's ``generation_config.json`` says
        where that differs from transformers' defaults; other than vLLM's, they may be changed
        without changing those of later calls."""
        return self._default_params.clone()

    @cached_property
    def _default_params(self) -> SamplingParams:
        return default_sampling_params(*self._generation_config)

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix that is kept for later prompts; waits for the call that runs."""
        with self._one_call("reset_prefix_cache"):
            self._context.engine.reset_prefix_cache()
        return True

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as transformers loads it.

        Raises:
            ValueError: ``skip_tokenizer_init`` was given.
        """
        if not self._has_tokenizer:
            raise ValueError("there is no tokenizer; leave skip_tokenizer_init out")
        from transformers import AutoTokenizer

        name, revision = self._source
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, revision=revision)
        return tokenizer

    @property
    def llm_engine(self) -> EngineView:
        """Sizes and settings of the engine under vLLM's names, to read."""
        return self._view

    @property
    def model_config(self) -> ModelView:
        """``llm_engine.model_config``."""
        return self._view.model_config

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self._context.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._context.vocab_size

    def stats(self) -> Stats:
        """``tokens``, ``throughput`` and ``kv`` of all calls so far, as in ``summary.json``.

        A dict, which a notebook shows as a table. Never waits: of a call that runs, the steps that
        it is done with count.
        """
        return self._calls.stats()

    def get_metrics(self) -> list[Metric]:
        """Tokens, hits of the prefix cache and preemptions of all calls so far, and what runs now,
        under vLLM's names; never waits. ``stats`` has more."""
        return read_metrics(
            self.stats(),
            str(self._settings["model"]["name"]),
            num_running=self._context.engine.num_running,
            num_waiting=self._context.engine.num_waiting,
        )

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        price_per_hour: float | None = None,
        currency: str = "USD",
    ) -> Path:
        """Write an HTML page about all calls so far: memory, speed, lengths. Never waits.

        Args:
            path: where to write it.
            price_per_hour: of the machine, to say what the calls cost.
            currency: of the price, as its code.

        Raises:
            UsageError: the packages that draw are not installed.
            OSError: it cannot be written.
        """
        check_installed()
        from batchinfer.report.page import page
        from batchinfer.report.report_data import Price

        price = None if price_per_hour is None else Price(price_per_hour, currency)
        findings = self._calls.findings(str(self._settings["model"]["name"]), self._settings)
        Path(path).write_bytes(page(findings, price).encode())
        return Path(path)

    def reset_stats(self) -> None:
        """Begin ``stats`` anew. Never waits: of a call that runs, the steps to come count."""
        self._calls.reset()

    def _prompts(self, items: Sequence[str | Prompt]) -> list[Prompt | RowError]:
        texts = [{"text": item} for item in items if isinstance(item, str)]
        made = iter(self._raw_texts.build(texts) if texts else [])
        return [next(made) if isinstance(item, str) else item for item in items]

    @cached_property
    def _raw_texts(self) -> ChildPrompts:
        return self._processes.prompts(RawTexts)

    def _items(
        self,
        prompts: Sequence[Prompt | RowError],
        given: sampling.SamplingParams | Sequence[sampling.SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[PromptRequest]:
        """Each prompt with its parameters and its adapter."""
        count = len(prompts)
        params = params_of_each(
            self._default_params if given is None else given,
            count,
            self.vocab_size,
            self._max_logprobs,
        )
        numbers = self._adapters.of_each(adapter, lora_request, count)
        distinct = {id(one): one for one in params}
        completed = {name: self._completed(one) for name, one in distinct.items()}
        params = [completed[id(one)] for one in params]
        asked = requests_of_each(lora_request, count)
        return list(map(PromptRequest, prompts, params, numbers, asked))

    def _completed(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a call with what the ``LLM`` was made with."""
        structure = params.structured_outputs
        if not self._has_tokenizer:
            if structure is not None or params.stop or params.bad_words:
                raise ValueError(
                    "structured_outputs, stop and bad_words need a tokenizer; leave "
                    "skip_tokenizer_init out"
                )
            return replace(params, detokenize=False)
        if structure is None:
            return params
        return replace(params, structured_outputs=self._schema_defaults.of(structure))


def _check_errors(errors: object) -> None:
    if errors not in ("raise", "return"):
        raise ValueError(f"errors is {errors!r}; it must be 'raise' or 'return'")
