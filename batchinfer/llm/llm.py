"""A model, loaded once; its calls are in the classes that ``LLM`` is made of."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchinfer.builders.engine import build_engine
from batchinfer.errors import NotYetError
from batchinfer.llm.arguments import (
    FIT,
    check_arguments,
    engine_config,
    model_config,
    model_name,
    reasoning_asked,
    schema_defaults,
    template_text,
    wants_random_weights,
)
from batchinfer.llm.calls import Calls, OneCall
from batchinfer.llm.compatibility import missing_attribute
from batchinfer.llm.generation import GenerationCalls
from batchinfer.llm.inspection import Inspection
from batchinfer.llm.lora import Adapters
from batchinfer.llm.params import read_logprobs_mode
from batchinfer.llm.pooling.calls import PoolingCalls
from batchinfer.llm.pooling.choose import choose_runner, classifier_tokens, refused_calls
from batchinfer.llm.pooling.runner import PoolingRunner
from batchinfer.llm.run import CallRunner
from batchinfer.llm.vllm.engine_view import engine_view
from batchinfer.report.sanitize import without_secrets
from batchinfer.text.processes.pool import TextProcesses
from batchinfer.text.reasoning.formats import find_reasoning_format
from batchinfer.text.tokenizer import no_tokenizer
from batchinfer.text.tools.formats import find_tool_format

_LOG = logging.getLogger("batchinfer.llm")


class LLM(GenerationCalls, PoolingCalls, Inspection):
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
        logprobs_mode: what is given as log-probabilities: ``raw_logprobs``, of the unmodified
            logits; ``processed_logprobs``, after penalties, temperature, top-k and the like;
            ``raw_logits`` and ``processed_logits``, the logits themselves. Prompts and beams have
            nothing of the processing, beams always log-probabilities.
        seed: what samples without a seed of their own depend on, with the number of the call;
            default: they are fresh in every call.
        load_format: ``dummy``: random weights of the model's shapes, whose files are not needed;
            to try settings and speed. Others change nothing.
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
        logprobs_mode: str = "raw_logprobs",
        seed: int | None = None,
        load_format: str | None = None,
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
        name = model_name(model)
        check_arguments(
            {
                "max_logprobs": max_logprobs,
                "seed": seed,
                "skip_tokenizer_init": skip_tokenizer_init,
                "enable_lora": enable_lora,
                "generation_config": generation_config,
                "override_generation_config": override_generation_config,
            }
        )
        engine = engine_config(engine_keys)
        tokens = classifier_tokens(hf_overrides)
        asked_reasoning = reasoning_asked(reasoning, reasoning_parser)
        mode = read_logprobs_mode(logprobs_mode)
        random_weights = wants_random_weights(load_format)
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
            runner=choose_runner(runner, task, name, revision),
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
            random_weights=random_weights,
        )
        self._processes.load(self._context.tokenizer)
        self._adapters = Adapters(choice.adapters, self._context)
        self._settings = without_secrets({"model": asdict(choice), "engine": asdict(engine)})
        self._calls = Calls(self._context)
        self._runner = CallRunner(
            *(self._context, self._calls, seed),
            find_reasoning_format(asked_reasoning, self._context.tokenizer, self._chat_template),
            find_tool_format(tool_parser, self._context.tokenizer, self._chat_template),
            mode,
        )
        self._pooling = PoolingRunner(
            choice, self._context, self._calls, tokens, random_weights=random_weights
        )
        self._view = engine_view(
            choice, engine, self._context, lambda: self._pooling.embedding_size
        )
        self._one_call = OneCall(refused_calls(choice.runner))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(name)
