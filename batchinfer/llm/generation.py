"""The calls of an ``LLM`` that write text: ``generate``, ``chat`` and ``beam_search``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from typing import Any

from batchinfer.builders.context import EngineContext
from batchinfer.config import PromptConfig, sampling
from batchinfer.config.beam_params import BeamSearchParams
from batchinfer.config.call_params import SamplingParams
from batchinfer.errors import RowError
from batchinfer.llm.arguments import SchemaDefaults
from batchinfer.llm.beam_outputs import BeamSearchOutput, beam_search_output
from batchinfer.llm.calls import OneCall
from batchinfer.llm.compatibility import settle
from batchinfer.llm.lora import Adapters, LoRARequest, requests_of_each
from batchinfer.llm.outputs import RequestOutput
from batchinfer.llm.params import check_priority, params_of_each
from batchinfer.llm.prompts import (
    Conversation,
    PromptLike,
    chat_tools,
    final_message,
    kind_of,
    read_conversations,
    read_prompts,
)
from batchinfer.llm.run import CallRunner, OnError, ProgressBar, PromptRequest
from batchinfer.text.processes.pool import TextProcesses, WorkerPrompts
from batchinfer.text.prompts import Prompt, PromptBuilder, RawTexts

_ANY_LENGTH = 2**31
"""Of conversations written out: the engine says which are too long."""
_KNOWN = ("sampling_params", "adapter", "lora_request", "use_tqdm", "errors")
_FROM_GENERATION_CONFIG: Mapping[str, str] = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Keys of ``generation_config.json`` that are parameters, as in vLLM's
``ModelConfig.get_diff_sampling_param`` (vllm/config/model.py)."""
_NEUTRAL = "vllm"


class GenerationCalls:
    """``generate``, ``chat`` and ``beam_search`` of an ``LLM``."""

    _adapters: Adapters
    _chat_template: str | None
    _context: EngineContext
    _generation_config: tuple[str, str | None, str, dict[str, Any]]
    _has_tokenizer: bool
    _max_logprobs: int | None
    _one_call: OneCall
    _processes: TextProcesses
    _runner: CallRunner
    _schema_defaults: SchemaDefaults

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
            read = read_prompts(
                prompts, self._context.vocab_size, has_tokenizer=self._has_tokenizer
            )
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
        tool_choice: str | Mapping[str, Any] = "auto",
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
            tool_choice: ``auto``: the model decides; ``none``: the template gets no tools;
                ``required``: each answer is calls, or a call of the tool that is named by
                ``{"type": "function", "function": {"name": ...}}``. A grammar holds it to that,
                and ``LLM(tool_parser=...)`` says how the model writes calls.
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
        row_tools = chat_tools(tools, tool_choice, has_parser=self._runner.reads_tools)
        with self._one_call("chat"):
            recipe = partial(
                PromptBuilder,
                PromptConfig(
                    column="messages",
                    chat_template="auto" if template is None else "chat_template",
                    chat_template_kwargs=chat_template_kwargs or {},
                    tools=None if row_tools is None else tuple(row_tools.tools),
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
            items = [replace(item, tools=row_tools) for item in items]
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
            read = read_prompts(
                prompts, self._context.vocab_size, has_tokenizer=self._has_tokenizer
            )
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
        return _recommended_params(*self._generation_config)

    def _prompts(self, items: Sequence[str | Prompt]) -> list[Prompt | RowError]:
        texts = [{"text": item} for item in items if isinstance(item, str)]
        made = iter(self._raw_texts.build(texts) if texts else [])
        return [next(made) if isinstance(item, str) else item for item in items]

    @cached_property
    def _raw_texts(self) -> WorkerPrompts:
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
            self._context.vocab_size,
            self._max_logprobs,
            self._context.max_model_len,
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


def _recommended_params(
    model: str, revision: str | None, generation_config: str, overrides: Mapping[str, Any]
) -> SamplingParams:
    """The parameters of a call that gives none.

    Args:
        model: hub id or folder.
        revision: of the hub's.
        generation_config: ``auto``: what the model's ``generation_config.json`` says where that
            differs from transformers' defaults; ``vllm``: neutral ones; else another folder.
        overrides: keys of that file, which win.

    Raises:
        TypeError, ValueError: what the file or ``overrides`` say is out of range.
    """
    found: dict[str, Any] = {}
    if generation_config == "auto":
        found = _read(model, revision)
    elif generation_config != _NEUTRAL:
        found = _read(generation_config, None)
    found |= overrides
    named = {ours: found.get(theirs) for theirs, ours in _FROM_GENERATION_CONFIG.items()}
    return SamplingParams(**{name: value for name, value in named.items() if value is not None})


def _read(folder: str, revision: str | None) -> dict[str, Any]:
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(folder, revision=revision)
    except OSError:  # the model has none
        return {}
    found: dict[str, Any] = config.to_diff_dict()
    return found
