"""The calls of an ``LLM`` that generate text: ``generate``, ``chat`` and ``beam_search``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from typing import Any

from batchinfer.builders.context import EngineContext
from batchinfer.config import ModelConfig, PromptConfig, sampling
from batchinfer.config.call_params import BeamSearchParams, SamplingParams
from batchinfer.errors import NotYetError, RowError
from batchinfer.llm.arguments import CallDefaults, SchemaDefaults
from batchinfer.llm.compatibility import settle
from batchinfer.llm.images import CallImages, TextWithImages, TokensWithImages
from batchinfer.llm.lora import AdapterNames, Adapters, LoRARequests, requests_of_each
from batchinfer.llm.outputs import (
    BeamSearchOutput,
    PromptRequest,
    RequestOutput,
    beam_search_output,
)
from batchinfer.llm.params import check_params
from batchinfer.llm.prompt_embeds import PromptEmbeds
from batchinfer.llm.prompts import (
    Conversation,
    PromptLike,
    chat_tools,
    final_message,
    kind_of,
    one_for_each,
    read_conversations,
    read_prompts,
)
from batchinfer.llm.run_prompts import CallRunner
from batchinfer.llm.run_requests import OnError, ProgressBar, RequestRunner
from batchinfer.text.processes.pool import TextProcesses, WorkerPrompts
from batchinfer.text.prompts import ANY_LENGTH, Prompt, PromptBuilder, RawTexts

_KNOWN = ("sampling_params", "adapter", "lora_request", "use_tqdm", "errors")
_FROM_GENERATION_CONFIG: Mapping[str, str] = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Names of sampling parameters, keyed by their names in ``generation_config.json``, as in vLLM's
``ModelConfig.get_diff_sampling_param`` (vllm/config/model.py)."""

ParamsOfEach = sampling.SamplingParams | Sequence[sampling.SamplingParams] | None


class GenerationCalls:
    """``generate``, ``chat`` and ``beam_search``; the subclass ``LLM`` sets the attributes."""

    _adapters: Adapters
    _calls: RequestRunner
    _chat_template: str | None
    _context: EngineContext
    _defaults: CallDefaults
    _embeds: PromptEmbeds | None
    _has_tokenizer: bool
    _model: ModelConfig
    _images: CallImages | None
    _processes: TextProcesses
    _runner: CallRunner
    _schema_defaults: SchemaDefaults

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsOfEach = None,
        *,
        adapter: AdapterNames = None,
        lora_request: LoRARequests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[RequestOutput]:
        """Generate continuations of prompts. Texts are used as they are: no chat template is
        applied, and special tokens in a text are parsed.

        Args:
            prompts: one or several texts, token id lists, ``{"prompt": ...}`` or
                ``{"prompt_token_ids": ...}``. Pass images in ``multi_modal_data``, as in vLLM:
                ``{"prompt": ..., "multi_modal_data": {"image": picture}}``, where the picture is a
                PIL image, an array [height, width, 3] of uint8, the bytes of a file, or a list of
                these. With ``LLM(enable_prompt_embeds=True)``, a prompt may be its embeddings:
                ``{"prompt_embeds": tensor}``, [tokens, H] in the model's dtype.
            sampling_params: one object for all prompts, or a list with one per prompt; default:
                ``get_default_sampling_params()``.
            adapter: name of the adapter for all prompts, or a list; None means the base model.
            lora_request: the adapter as an object of vLLM's class, or a list.
            use_tqdm: True to show a progress bar, or a function that creates one, with the
                arguments of tqdm's class.
            errors: ``raise``: a prompt that cannot run ends the call before any prompt has run;
                ``return``: the prompt's output has an ``error``, and the other prompts run. A
                prompt that fails while it runs has an ``error`` either way.
            others: other arguments of vLLM's ``generate``, which have no effect or are refused
                with a message that gives the alternative.

        Returns:
            An output for each prompt, in order.

        Raises:
            TypeError, ValueError: an argument is invalid, or a prompt cannot run. In this case, no
                prompt has run.
            RuntimeError: called from within another call.
            NotYetError: an argument is not supported yet.
        """
        settle("LLM.generate", others, (*_KNOWN, "prompts"))
        check_errors(errors)
        with self._calls.one_call("generate"):
            read = self._read_prompts(prompts)
            items = self._items(read, sampling_params, adapter, lora_request)
            return self._runner.run(items, errors, use_tqdm)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation] | None = None,
        sampling_params: ParamsOfEach = None,
        *,
        messages: Conversation | Sequence[Conversation] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        adapter: AdapterNames = None,
        lora_request: LoRARequests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[RequestOutput]:
        """Render conversations with the model's chat template, and generate answers.

        If the last message is the assistant's, the model continues it, unless
        ``add_generation_prompt`` or ``continue_final_message`` is given.

        Args:
            messages: vLLM's name for ``conversations``.
            chat_template: text of another template (Jinja2).
            chat_template_kwargs: more variables for the template.
            add_generation_prompt: True: start a new assistant message after the last message;
                False: add nothing.
            continue_final_message: True: continue the last message instead of starting a new one.
            tools: tools that the model may call, in OpenAI's format; passed to the template.
            tool_choice: ``auto``: the model decides; ``none``: the template gets no tools;
                ``required``: each answer consists of tool calls; or ``{"type": "function",
                "function": {"name": ...}}``: each answer is a call to that tool. A grammar enforces
                calls, in the format of ``LLM(tool_parser=...)``.
            others: see ``generate``.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError: see ``generate``.
            ModelError: the model has no chat template.
            UsageError: ``chat_template`` is not a valid template.
        """
        settle("LLM.chat", others, (*_KNOWN, "conversations", "chat_template_kwargs"))
        check_errors(errors)
        given_conversations = messages if conversations is None else conversations
        if given_conversations is None or (conversations is not None and messages is not None):
            raise TypeError(
                "give conversations or messages, but not both, because they mean the same"
            )
        if not self._has_tokenizer:
            raise ValueError("LLM.chat needs a tokenizer; leave out skip_tokenizer_init")
        if not isinstance(chat_template, str | None):
            raise TypeError(
                f"chat_template is {kind_of(chat_template)}; give the text of a template, or None"
            )
        template = self._chat_template if chat_template is None else chat_template
        rows = [{"messages": item} for item in read_conversations(given_conversations)]
        row_tools = chat_tools(tools, tool_choice, has_parser=self._runner.reads_tools)
        with self._calls.one_call("chat"):
            recipe = partial(
                PromptBuilder,
                PromptConfig(
                    column="messages",
                    chat_template="auto" if template is None else "chat_template",
                    chat_template_kwargs=chat_template_kwargs or {},
                    tools=None if row_tools is None else tuple(row_tools.tools),
                ),
                max_model_len=ANY_LENGTH,
                columns=["messages"],
                conversation_columns=["messages"],
                chat_template_source=template,
                vocab_size=self._context.vocab_size,
                now=datetime.now(),
                final_message=final_message(add_generation_prompt, continue_final_message),
                images=None if self._images is None else self._images.settings,
            )
            built = [
                _naming_conversation(prompt, at) if isinstance(prompt, RowError) else prompt
                for at, prompt in enumerate(self._processes.prompts(recipe).build(rows))
            ]
            items = self._items(built, sampling_params, adapter, lora_request)
            for item in items:
                item.tools = row_tools
            return self._runner.run(items, errors, use_tqdm)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        adapter: AdapterNames = None,
        lora_request: LoRARequests = None,
        use_tqdm: ProgressBar = False,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """Find likely continuations of prompts; other arguments are as in ``generate``.

        Returns:
            An output for each prompt, in order. Its ``outputs`` are the ``beam_width`` best
            continuations, best first, each with its ``score``; its ``sequences`` are the same
            continuations in vLLM's format.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError: see ``generate``.
        """
        settle("LLM.beam_search", others, (*_KNOWN, "prompts", "params"))
        check_errors(errors)
        if not isinstance(params, BeamSearchParams):
            raise TypeError("params must be BeamSearchParams(beam_width=..., max_tokens=...)")
        with self._calls.one_call("beam_search"):
            read = self._read_prompts(prompts)
            if any(isinstance(prompt, Prompt) and prompt.embeds is not None for prompt in read):
                hint = "call LLM.generate with SamplingParams(beam_width=...)"
                raise NotYetError("LLM.beam_search with prompt_embeds", hint=hint)
            items = self._items(read, params.sampling(), adapter, lora_request)
            outputs = self._runner.run(items, errors, use_tqdm)
            tokenizer = self._context.tokenizer if self._has_tokenizer else None
            return [beam_search_output(output, params, tokenizer) for output in outputs]

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of calls, from the model's ``generation_config.json``.

        Unlike in vLLM, changing the returned object does not change later calls.
        """
        return self._default_params.clone()

    @cached_property
    def _default_params(self) -> SamplingParams:
        """Default parameters of calls; raises TypeError or ValueError for a bad value."""
        source, values = self._defaults.generation_config, dict[str, Any]()
        if source == "auto":
            values = _read_generation_config(self._model.name, self._model.revision)
        elif source != "vllm":
            values = _read_generation_config(source, None)
        values |= self._defaults.override_generation_config or {}
        named = {ours: values.get(theirs) for theirs, ours in _FROM_GENERATION_CONFIG.items()}
        return SamplingParams(**{name: value for name, value in named.items() if value is not None})

    def _read_prompts(self, prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt | RowError]:
        read = read_prompts(
            prompts,
            self._context.vocab_size,
            has_tokenizer=self._has_tokenizer,
            embeds=self._embeds,
        )
        with_images = [item for item in read if isinstance(item, TextWithImages | TokensWithImages)]
        if with_images and self._images is None:
            raise ValueError(
                f"prompt {read.index(with_images[0])} has multi_modal_data, but this model takes "
                "only text, or its images are not supported yet"
            )
        built = iter([] if self._images is None else self._images.prompts(with_images))
        others = [item for item in read if isinstance(item, str | Prompt)]
        tokenized = iter(self._tokenized(others))
        return [next(tokenized if isinstance(item, str | Prompt) else built) for item in read]

    def _tokenized(self, items: Sequence[str | Prompt]) -> list[Prompt | RowError]:
        texts = [{"text": item} for item in items if isinstance(item, str)]
        built = iter(self._raw_texts.build(texts) if texts else [])
        return [next(built) if isinstance(item, str) else item for item in items]

    @cached_property
    def _raw_texts(self) -> WorkerPrompts:
        images = None if self._images is None else self._images.settings
        return self._processes.prompts(partial(RawTexts, images=images))

    def _items(
        self,
        prompts: Sequence[Prompt | RowError],
        given: ParamsOfEach,
        adapter: AdapterNames,
        lora_request: LoRARequests,
    ) -> list[PromptRequest]:
        count = len(prompts)
        each: list[sampling.SamplingParams] = one_for_each(
            self._default_params if given is None else given,
            sampling.SamplingParams,
            "sampling_params",
            "SamplingParams(...)",
            count,
            "sampling params",
        )
        distinct = {id(params): params for params in each}
        checked = dict[int, SamplingParams]()
        for key, params in distinct.items():
            checked[key] = self._checked(params)
        numbers = self._adapters.numbers(adapter, lora_request, count)
        requests = requests_of_each(lora_request, count)
        return [
            PromptRequest(prompt, checked[id(params)], number, request)
            for prompt, params, number, request in zip(
                prompts, each, numbers, requests, strict=True
            )
        ]

    def _checked(self, params: sampling.SamplingParams) -> SamplingParams:
        """Check the parameters of a call, and fill in the defaults of the ``LLM``."""
        checked = SamplingParams.of(params)
        size, longest = self._context.vocab_size, self._context.max_model_len
        check_params(checked, size, self._defaults.max_logprobs, longest)
        structure = checked.structured_outputs
        if not self._has_tokenizer:
            if structure is not None or checked.stop or checked.bad_words:
                raise ValueError(
                    "structured_outputs, stop and bad_words need a tokenizer; "
                    "leave out skip_tokenizer_init"
                )
            return replace(checked, detokenize=False)
        if structure is None:
            return checked
        return replace(checked, structured_outputs=self._schema_defaults.apply(structure))


def _naming_conversation(error: RowError, at: int) -> RowError:
    """Replace the column name in a prompt's error with the conversation's number, because the
    prompts of a chat call do not come from columns."""
    message = error.message.replace("column messages: the conversation", f"conversation {at}")
    return RowError(error.code, message.replace("column messages", f"conversation {at}"))


def check_errors(errors: object) -> None:
    """Raise ValueError for an unknown value of a call's argument ``errors``."""
    if errors not in ("raise", "return"):
        raise ValueError(f"errors is {errors!r}; it must be 'raise' or 'return'")


def _read_generation_config(folder: str, revision: str | None) -> dict[str, Any]:
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(folder, revision=revision)
    except OSError:  # the file does not exist
        return {}
    values: dict[str, Any] = config.to_diff_dict()
    return values
