"""A model, loaded once, and the calls that run it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from batchinfer.build import build_engine
from batchinfer.config import PromptConfig, SamplingParams
from batchinfer.console.meter import Meter
from batchinfer.engine.request import Completion, Request, TokenIds
from batchinfer.errors import NotYetError, RowError
from batchinfer.llm.arguments import engine_config, model_config, refuse_others
from batchinfer.llm.calls import Calls, OneCall
from batchinfer.llm.outputs import BeamSearchParams, RequestOutput, Stats, finished, refused
from batchinfer.llm.prompts import (
    Conversation,
    PromptLike,
    adapters_of_each,
    params_of_each,
    read_conversations,
    read_prompts,
)
from batchinfer.process import gc_frozen
from batchinfer.report.sanitize import without_secrets
from batchinfer.report.write import check_installed
from batchinfer.requests import PromptRow, RequestMaker, RowSampling
from batchinfer.resampling import Resampling
from batchinfer.text.children.pool import ChildPrompts, TextProcesses
from batchinfer.text.grammar import GrammarCompiler
from batchinfer.text.prompts import Prompt, PromptBuilder, RawTexts
from batchinfer.text.structured.grammar_source import GrammarError
from batchinfer.text.structured.json_validator import SchemaError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger("batchinfer.llm")


class LLM:
    """A model, loaded once and run on as many prompts as are given.

    Calls may come from several threads: one runs at a time, the others wait for it. Give all
    prompts in one call where you can; that is what the engine is fast at.

    Args:
        model: hub id or local directory.
        tokenizer: hub id or directory of another tokenizer; default the model's.
        revision: of a model on the hub; a tokenizer of its own is its repository's latest.
        dtype: ``auto`` (as saved), ``float32``, ``bfloat16`` or ``float16``.
        max_model_len: longest prompt and output together; default what the model allows.
        quantization: ``int8``, ``fp8``, ``int8_weight_only`` or ``int4_weight_only``; default as
            saved.
        adapters: LoRA adapters as peft saves them: folder or hub id by name.
        tensor_parallel_size: accepted for compatibility; must be 1.
        engine_keys: keys of the job file's ``engine`` section, e.g. ``block_size=32``.

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
        revision: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        quantization: str | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        tensor_parallel_size: int = 1,
        **engine_keys: Any,
    ) -> None:
        if tensor_parallel_size != 1:
            raise NotYetError(f"LLM(tensor_parallel_size={tensor_parallel_size})")
        engine = engine_config(engine_keys)
        choice = model_config(
            model,
            tokenizer=tokenizer,
            revision=revision,
            dtype=dtype,
            max_model_len=max_model_len,
            quantization=quantization,
            adapters=adapters or {},
        )
        # A revision is one of the model's repository.
        self._source = (choice.tokenizer, None) if choice.tokenizer else (choice.name, revision)
        self._processes = TextProcesses()  # they start while the model is loaded
        self._context = build_engine(choice, engine, log=_LOG.info)
        self._processes.load(self._context.tokenizer)
        facts = self._context.tokenizer, self._context.eos_token_ids
        grammars = GrammarCompiler(*facts, self._context.vocab_size)
        self._samples = Resampling(RequestMaker(*facts, grammars), self._context.tokenizer)
        self._settings = without_secrets({"model": asdict(choice), "engine": asdict(engine)})
        self._calls = Calls(self._context)
        self._num_requests = 0
        self._one_call = OneCall()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue prompts. Text is taken raw: no template, special tokens are parsed.

        Args:
            prompts: one or several texts, token id lists, ``{"prompt": ...}`` or
                ``{"prompt_token_ids": ...}``.
            sampling_params: one for all prompts, or one each.
            adapter: name of the adapter for all prompts, or one each; None runs the base model.
            use_tqdm: show a progress bar.
            others: arguments of vLLM's ``generate``; refused, with what to do instead.

        Returns:
            An output for each prompt, in order.

        Raises:
            TypeError, ValueError: an argument is no prompt or no sampling parameters, a token id
                is not the model's; before anything runs.
            RuntimeError: called from within another call.
            NotYetError: an argument is known, and not built yet.
        """
        refuse_others("LLM.generate", others, ("prompts", "sampling_params", "adapter", "use_tqdm"))
        with self._one_call("generate"):
            items = self._prompts(read_prompts(prompts, self.vocab_size))
            return self._run(items, sampling_params, adapter, use_tqdm)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, written out by the model's chat template.

        A conversation that ends with the assistant's words is continued there.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError: as ``generate``.
            ModelError: the model has no chat template.
        """
        known = ("conversations", "sampling_params", "chat_template_kwargs", "adapter", "use_tqdm")
        refuse_others("LLM.chat", others, known)
        rows = [{"messages": item} for item in read_conversations(conversations)]
        with self._one_call("chat"):
            config = PromptConfig(
                column="messages", chat_template_kwargs=chat_template_kwargs or {}
            )
            recipe = partial(
                PromptBuilder,
                config,
                max_model_len=self._context.max_model_len,
                columns=["messages"],
                conversation_columns=["messages"],
                vocab_size=self._context.vocab_size,
                now=datetime.now(),
            )
            made = self._processes.prompts(recipe).build(rows)
            return self._run(made, sampling_params, adapter, use_tqdm)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = False,
        **others: Any,
    ) -> list[RequestOutput]:
        """Find likely continuations of prompts, which are taken as by ``generate``.

        Returns:
            An output for each prompt, in order; its ``outputs`` are the ``beam_width`` best
            continuations, best first, each with its ``score``.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError: as ``generate``.
        """
        refuse_others("LLM.beam_search", others, ("prompts", "params", "adapter", "use_tqdm"))
        if not isinstance(params, BeamSearchParams):
            raise TypeError("params must be BeamSearchParams(beam_width=..., max_tokens=...)")
        with self._one_call("beam_search"):
            items = self._prompts(read_prompts(prompts, self.vocab_size))
            return self._run(items, params.sampling(), adapter, use_tqdm)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as transformers loads it."""
        from transformers import AutoTokenizer

        name, revision = self._source
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, revision=revision)
        return tokenizer

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

    def report(self, path: str | os.PathLike[str], *, price_per_hour: float | None = None) -> Path:
        """Write an HTML page about all calls so far: memory, speed, lengths. Never waits.

        Args:
            path: where to write it.
            price_per_hour: of the machine, to say what the calls cost.

        Raises:
            UsageError: the packages that draw are not installed.
            OSError: it cannot be written.
        """
        check_installed()
        from batchinfer.report.page import page

        findings = self._calls.findings(str(self._settings["model"]["name"]), self._settings)
        Path(path).write_bytes(page(findings, price_per_hour).encode())
        return Path(path)

    def reset_stats(self) -> None:
        """Begin ``stats`` anew. Never waits: of a call that runs, the steps to come count."""
        self._calls.reset()

    def _prompts(self, items: Sequence[str | TokenIds]) -> list[Prompt | RowError]:
        texts = [{"text": item} for item in items if isinstance(item, str)]
        made = iter(self._raw_texts.build(texts) if texts else [])
        return [
            next(made) if isinstance(item, str) else Prompt(item, None, False, False)
            for item in items
        ]

    @cached_property
    def _raw_texts(self) -> ChildPrompts:
        return self._processes.prompts(RawTexts)

    def _run(
        self,
        prompts: Sequence[Prompt | RowError],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = params_of_each(sampling_params, len(prompts), self.vocab_size)
        numbers = adapters_of_each(adapter, len(prompts), self._context.adapters)
        fresh_seed = secrets.randbits(64)
        requests: list[Request] = []
        rows: dict[int, PromptRow] = {}
        parts: dict[int, list[Completion]] = {}
        outputs: dict[int, RequestOutput] = {}
        for at, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            if isinstance(prompt, RowError):
                outputs[at] = refused(self._request_id(at), prompt)
            else:
                own_seed = one.seed is not None
                sampling = RowSampling(one if own_seed else replace(one, seed=fresh_seed), own_seed)
                rows[at] = PromptRow(at, prompt, sampling, adapter=numbers[at])
                requests += self._first_requests(rows[at])
        meter = Meter(len(prompts))
        with (
            tqdm(total=len(prompts), disable=not use_tqdm, unit="prompt") as bar,
            closing(self._calls.run(requests, meter)) as completions,
            gc_frozen(),
        ):
            bar.update(len(outputs))
            for completion in completions:
                at = completion.request.row_id
                parts.setdefault(at, []).append(completion)
                if further := self._samples.follow_up_requests(rows[at], parts[at]):
                    self._calls.add(further)
                    continue
                whole, _ = self._samples.result(rows[at], parts.pop(at))
                prompt = prompts[at]
                assert isinstance(prompt, Prompt)
                name = self._request_id(at)
                outputs[at] = finished(name, whole, prompt, self._context.tokenizer)
                bar.set_postfix_str(meter.rates, refresh=False)
                bar.update()
        self._num_requests += len(prompts)
        return [outputs[at] for at in range(len(prompts))]

    def _first_requests(self, row: PromptRow) -> list[Request]:
        try:
            return self._samples.requests(row)
        except (GrammarError, SchemaError) as error:
            raise ValueError(f"prompt {row.row_id}: structured_outputs: {error}") from None

    def _request_id(self, at: int) -> str:
        return str(self._num_requests + at)
