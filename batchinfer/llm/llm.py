"""``LLM``, the class of the Python API; its base classes define the calls."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from batchinfer.builders.engine import build_engine
from batchinfer.config import QUANTIZATIONS, ModelConfig
from batchinfer.errors import NotYetError
from batchinfer.llm.arguments import (
    FIT,
    CallDefaults,
    as_text,
    dtype_name,
    engine_config,
    model_name,
    reasoning_markers,
    schema_defaults,
    template_text,
    wants_random_weights,
)
from batchinfer.llm.compatibility import METHODS
from batchinfer.llm.generation import GenerationCalls
from batchinfer.llm.images import CallImages
from batchinfer.llm.lora import Adapters
from batchinfer.llm.outputs import Stats
from batchinfer.llm.params import read_logprobs_mode
from batchinfer.llm.pooling.calls import PoolingCalls
from batchinfer.llm.pooling.choose_runner import choose_runner, classifier_tokens, refused_calls
from batchinfer.llm.pooling.runner import PoolingRunner
from batchinfer.llm.prompt_embeds import PromptEmbeds
from batchinfer.llm.run_prompts import CallRunner
from batchinfer.llm.run_requests import RequestRunner
from batchinfer.llm.vllm_views import EngineView, Metric, ModelView, read_metrics
from batchinfer.report.sanitize import without_secrets
from batchinfer.text.processes.pool import TextProcesses
from batchinfer.text.reasoning.formats import find_reasoning_format
from batchinfer.text.tokenizer import no_tokenizer
from batchinfer.text.tools.formats import find_tool_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger("batchinfer.llm")


class LLM(GenerationCalls, PoolingCalls):
    """A language model that is loaded once and then runs prompts.

    Several threads may call an ``LLM``; calls run one at a time. Pass all prompts in one call if
    you can, because the engine is fastest with many prompts.

    Args:
        model: hub id or local directory.
        tokenizer: hub id or directory of another tokenizer; default: the model's.
        skip_tokenizer_init: accept and return only token ids; do not read the tokenizer's files.
        revision: branch, tag or commit of a model on the hub. ``tokenizer`` does not use it.
        dtype: ``auto`` (as saved), ``float32`` (``float``), ``bfloat16``, ``float16``
            (``half``), or a torch dtype.
        max_model_len: maximum number of tokens of prompt and output together; default: the model's
            limit; -1: as many tokens as fit in the KV cache.
        max_logprobs: maximum number of alternatives that ``logprobs`` and ``prompt_logprobs`` may
            request; -1: any number; default: 20, or the whole vocabulary with ``logprobs=-1``.
        logprobs_mode: ``raw_logprobs``: log-probabilities of the unmodified logits;
            ``processed_logprobs``: after penalties, temperature, top-k and so on; ``raw_logits``
            and ``processed_logits``: the logits themselves. Values of prompt tokens are never
            processed, and beam search always returns log-probabilities.
        seed: seed for samples whose parameters set no seed; each call derives another seed from it.
            Default: a random seed for every call.
        load_format: ``dummy`` makes random weights with the model's shapes, to try settings and
            speed without weight files. Other formats have no effect.
        quantization: ``int8``, ``int4``, ``fp8``, ``int8_weight_only`` or
            ``int4_weight_only``; default: as saved.
        adapters: LoRA adapters in peft's format: a dict from the adapter's name to its folder or
            hub id.
        enable_lora: True to let calls pass more adapters as ``LoRARequest``; each is loaded when
            first used.
        enable_prompt_embeds: True to accept prompts as embeddings: ``{"prompt_embeds": tensor}``.
        generation_config: folder whose ``generation_config.json`` sets
            ``get_default_sampling_params``; ``auto``: the model's folder; ``vllm``: no folder, only
            vLLM's defaults.
        override_generation_config: values that replace values of ``generation_config.json``.
        structured_outputs_config: vLLM's class, or a dict; ``disable_any_whitespace`` and
            ``disable_additional_properties`` apply to schemas that do not set them.
        guided_decoding_disable_any_whitespace: the earlier name of ``disable_any_whitespace``.
        reasoning: how to separate the model's reasoning from ``text`` in all outputs: ``auto``: by
            the markers in its chat template; ``{"start": text, "end": text}``: by these markers;
            ``none``: reasoning stays in the text.
        reasoning_parser: vLLM's name for the reasoning format, such as ``qwen3``; use it instead of
            ``reasoning``.
        tool_parser: format of tool calls: ``auto``: the format in the chat template; vLLM's name of
            a format, such as ``hermes``; or ``none``: calls stay in the text.
        chat_template: text or file of the default template (Jinja2) for chats; default: the
            model's.
        runner: ``generate``: generate text; ``pooling``: only ``embed``, ``classify`` and
            ``score``; ``auto``: choose by the model's class.
        task: the earlier name of ``runner``: ``generate``, ``embed``, ``classify`` or ``score``.
        hf_overrides: a dict with ``classifier_from_token``, the tokens with which a reranker
            answers no and yes: ``["no", "yes"]``.
        tensor_parallel_size: accepted for compatibility; must be 1.
        engine_keys: keys of the job file's ``engine`` section, like ``block_size=32``, and
            arguments of vLLM that have no effect here, which produce a warning.

    Raises:
        ModelError: the model cannot be loaded or run.
        DeviceError: the device is missing or too small.
        NotYetError: an argument is not supported yet.
        TypeError: an argument is unknown or has the wrong type.
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
        enable_prompt_embeds: bool = False,
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
        self._defaults = CallDefaults(
            max_logprobs=max_logprobs,
            seed=seed,
            skip_tokenizer_init=skip_tokenizer_init,
            enable_lora=enable_lora,
            enable_prompt_embeds=enable_prompt_embeds,
            generation_config=as_text(generation_config),
            override_generation_config=override_generation_config,
        )
        engine = engine_config(engine_keys)
        tokens = classifier_tokens(hf_overrides)
        markers = reasoning_markers(reasoning, reasoning_parser)
        mode = read_logprobs_mode(logprobs_mode)
        random_weights = wants_random_weights(load_format)
        self._schema_defaults = schema_defaults(
            structured_outputs_config, guided_decoding_disable_any_whitespace
        )
        folders: Any = adapters or {}
        if isinstance(folders, Mapping):
            folders = {adapter: as_text(path) for adapter, path in folders.items()}
        self._model = ModelConfig(
            name=name,
            revision=revision,
            tokenizer=as_text(tokenizer),
            dtype=dtype_name(dtype),
            max_model_len=None if max_model_len == FIT else max_model_len,
            quantization=quantization,
            adapters=folders,
            runner=choose_runner(runner, task, name, revision),
        )
        if quantization is not None and quantization not in QUANTIZATIONS:
            known = f"use one of {', '.join(QUANTIZATIONS)}, or leave it out"
            raise NotYetError(f"LLM(quantization={quantization!r})", hint=known)
        self._chat_template = template_text(chat_template)
        self._has_tokenizer = not skip_tokenizer_init
        self._processes = TextProcesses()  # processes start while the model is loaded
        self._context = build_engine(
            self._model,
            engine,
            log=_LOG.info,
            tokenizer=None if self._has_tokenizer else no_tokenizer(),
            fit_length=max_model_len == FIT,
            more_adapters=enable_lora,
            random_weights=random_weights,
            with_images=self._has_tokenizer and not random_weights,
        )
        numbers = itertools.count()
        self._images = None
        if self._context.images is not None:
            self._images = CallImages(self._context.images, self._processes, numbers)
        self._embeds = self._reader_of_embeds(numbers) if enable_prompt_embeds else None
        settings = None if self._images is None else self._images.settings
        self._processes.load(self._context.tokenizer, settings)
        self._adapters = Adapters(self._model.adapters, self._context)
        self._settings = without_secrets({"model": asdict(self._model), "engine": asdict(engine)})
        self._calls = RequestRunner(self._context, refused_calls(self._model.runner))
        self._runner = CallRunner(
            *(self._context, self._calls, seed),
            find_reasoning_format(markers, self._context.tokenizer, self._chat_template),
            find_tool_format(tool_parser, self._context.tokenizer, self._chat_template),
            mode,
            self._images,
        )
        self._pooling = PoolingRunner(
            self._model, self._context, self._calls, tokens, random_weights=random_weights
        )
        self._view = EngineView(self._model, engine, self._context, self._pooling)

    def _reader_of_embeds(self, numbers: Iterator[int]) -> PromptEmbeds:
        size = self._context.embedding_size()
        if not size:
            raise NotYetError(
                "LLM(enable_prompt_embeds=True) for an encoder, or for a model whose layers also "
                "read token ids,"
            )
        dtype = getattr(torch, self._context.model_facts["dtype"])
        return PromptEmbeds(size, dtype, numbers)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes, after the active call has ended. Returns True."""
        with self._calls.one_call("reset_prefix_cache"):
            self._context.engine.reset_prefix_cache()
        return True

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, as transformers loads it.

        Raises:
            ValueError: ``skip_tokenizer_init`` was given.
        """
        if not self._has_tokenizer:
            raise ValueError("this LLM has no tokenizer; leave out skip_tokenizer_init")
        from transformers import AutoTokenizer

        name, revision = self._model.tokenizer, None
        if name is None:
            name, revision = self._model.name, self._model.revision
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, revision=revision)
        return tokenizer

    @property
    def llm_engine(self) -> EngineView:
        """Sizes and settings of the engine under vLLM's names; read-only."""
        return self._view

    @property
    def model_config(self) -> ModelView:
        """Same as ``llm_engine.model_config``."""
        return self._view.model_config

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self._context.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._context.vocab_size

    def stats(self) -> Stats:
        """Return ``tokens``, ``throughput`` and ``kv`` of all calls so far, as in
        ``summary.json``: a dict, which a notebook shows as a table.

        Never waits: finished steps of an active call are included.
        """
        return self._calls.stats()

    def get_metrics(self) -> list[Metric]:
        """Return counters of all calls so far (tokens, prefix cache hits, preemptions) and the
        number of active requests, under vLLM's names. Never waits. ``stats`` has more numbers."""
        return read_metrics(self.stats(), self._context, str(self._settings["model"]["name"]))

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        price_per_hour: float | None = None,
        currency: str = "USD",
    ) -> Path:
        """Write an HTML page about all calls so far: memory, speed, lengths. Never waits.

        Args:
            path: the file to write.
            price_per_hour: price of the machine for one hour, to show what the calls cost.
            currency: code of the price's currency.

        Raises:
            OSError: the file cannot be written.
        """
        from batchinfer.report.page import page
        from batchinfer.report.report_data import Price

        price = None if price_per_hour is None else Price(price_per_hour, currency)
        data = self._calls.report_data(str(self._settings["model"]["name"]), self._settings)
        Path(path).write_bytes(page(data, price).encode())
        return Path(path)

    def reset_stats(self) -> None:
        """Reset ``stats``. Never waits; if a call is active, its later steps are still counted."""
        self._calls.reset()

    def reward(self, *_: object, **__: object) -> NoReturn:
        """Refuse vLLM's call for reward models, which is not supported yet."""
        raise NotYetError("LLM.reward")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in METHODS:
                raise AttributeError(f"LLM has no {name}: {METHODS[name]}")
            raise AttributeError(f"LLM has no attribute {name}")
