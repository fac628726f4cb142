"""Parses lines of OpenAI batch files into prompts and sampling parameters.

Every field that changes the answer is either supported or refused: an unknown field, or a value
that asks for something unsupported, turns the line into an error. Fields without effect are
ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath
from typing import Any

from batchinfer.config import MAX_LOGPROBS, SamplingParams, field_names
from batchinfer.console.format import did_you_mean, format_value, listed, printable
from batchinfer.errors import RowError
from batchinfer.job.input.openai_batch import CHAT, COMPLETIONS, PROMPT_INDEX
from batchinfer.text.chat import RESERVED_KWARGS
from batchinfer.text.tools.row_tools import RowTools, row_tools

_LINE = ("custom_id", "method", "url", "body")
NO_EFFECT = ("model", "user", "priority", "request_id")
"""Fields of every kind of request that do not change the answer."""
_NO_EFFECT = (
    *(*NO_EFFECT, "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "stream_options", "guided_decoding_backend"),
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (True,),
}
"""Fields of unsupported features, with the values that do not use the feature."""
_GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""Maps vLLM's ``guided_...`` fields to the keys of ``structured_outputs``."""
_PARSED = (
    *("messages", "prompt", "best_of", "logprobs", "top_logprobs", "tools", "tool_choice", "echo"),
    *("use_beam_search", "chat_template_kwargs", "reasoning_effort", *_GUIDED),
)
_SAMPLING = {*field_names(SamplingParams), "max_completion_tokens", "response_format"}
_SAMPLING -= {"prompt_logprobs", "logprobs"}  # answers have no field for prompt_logprobs
_KNOWN = (*_PARSED, *sorted(_SAMPLING), *_NO_EFFECT, *_NEUTRAL)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    source: str
    """Form of the prompt: ``messages``, ``tools`` (messages and tools), ``prompt``, ``token_ids``
    or ``pair``."""
    value: Any
    """A single prompt in the form that ``source`` names; requests were split by prompts before."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``SamplingParams`` that the line sets."""
    model: str | None = None
    tools: RowTools | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Extra variables for the chat template."""


@dataclass(frozen=True)
class RequestKind:
    """A kind of request, and how to read requests of that kind."""

    urls: Sequence[str]
    """Accepted values of ``url``."""
    parse: Callable[[str, Mapping[str, Any]], ParsedRequest]
    """Parses a request's URL and its body, which has no nulls; raises ``RowError``."""
    fields: Mapping[str, str]
    """Maps the names of prompt columns in error messages to the names of the request's fields."""
    pair_columns: tuple[str, str] | None = None
    """The job's columns for the two texts of a pair; None if prompts are single texts."""

    def read(
        self,
        line: Mapping[str, Any],
        served_names: Sequence[str] | None,
        adapters: Collection[str] = (),
    ) -> ParsedRequest:
        """Parse and check the JSON object of a line.

        Args:
            served_names: names that ``model`` may have; None accepts any name.
            adapters: full names of adapters that ``model`` may name instead.

        Raises:
            RowError: ``invalid_request``, ``unknown_model``, ``unsupported_parameter``,
                ``bad_sampling_params``.
        """
        body = self._checked_body(line)
        _check_model(body.get("model"), served_names, adapters)
        return self.parse(line["url"], {k: v for k, v in body.items() if v is not None})

    def _checked_body(self, line: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in line:
            if name not in _LINE:
                raise invalid(f"unknown field {format_value(name)}{did_you_mean(name, _LINE)}")
        body = line.get("body")
        if line.get("method") != "POST":
            raise invalid(f"method is {format_value(line.get('method'))}; it must be POST")
        if line.get("url") not in self.urls:
            raise invalid(
                f"url is {format_value(line.get('url'))}; it must be "
                f"{' or '.join(self.urls)} like the rest of the file; put requests "
                "for other URLs into another file"
            )
        if not isinstance(body, Mapping):
            raise invalid(f"body is {format_value(body)}; it must be an object")
        if type(body.get(PROMPT_INDEX, 0)) is not int:
            raise unsupported(PROMPT_INDEX)
        return {name: value for name, value in body.items() if name != PROMPT_INDEX}


def generation_requests(*, has_tools: bool = False) -> RequestKind:
    """Return the ``RequestKind`` of requests for chat and text completions; ``has_tools`` is True
    if the job parses tool calls."""
    fields = {
        "column messages": "body.messages",
        "column prompt": "body.prompt",
        "column token_ids": "body.prompt",
        "column tools": "body.tools",
    }
    return RequestKind((CHAT, COMPLETIONS), partial(_parse, has_tools=has_tools), fields)


def _parse(url: str, body: Mapping[str, Any], *, has_tools: bool) -> ParsedRequest:
    is_chat = url == CHAT
    source, value = _messages(body) if is_chat else _prompt(body)
    check_fields(body, _KNOWN, _NEUTRAL)
    sampling = {name: value for name, value in body.items() if name in _SAMPLING}
    if sampling.get("max_tokens") == sampling.get("max_completion_tokens"):
        sampling.pop("max_completion_tokens", None)
    logprobs = _chat_logprobs(body) if is_chat else _completion_logprobs(body)
    echo = _echo(body, is_chat=is_chat)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
        if echo:
            sampling["prompt_logprobs"] = logprobs
    if _flag(body, "use_beam_search"):
        sampling.setdefault("beam_width", body.get("n", 1))
    guided = {key: body[name] for name, key in _GUIDED.items() if name in body}
    if guided and "structured_outputs" in sampling:
        raise _bad("structured_outputs and guided_... are both given; keep one")
    if guided:
        sampling["structured_outputs"] = guided
    if "best_of" in body and body["best_of"] != body.get("n", 1):
        raise unsupported("best_of", " unless it equals n; leave it out, and set n instead")
    tools = _tools(body, is_chat=is_chat, has_tools=has_tools)
    if has_tools and is_chat:
        value = [_with_argument_values(message) for message in value]
        source = source if tools is None else "tools"
    variables = _template_variables(body, is_chat=is_chat)
    return ParsedRequest(source, value, sampling, body.get("model"), tools, variables)


def is_served(model: str, served_names: Sequence[str]) -> bool:
    """Return True if ``model`` is a served name or the last path components of a served name."""
    parts = PurePath(model).parts
    return any(
        model == name or (parts and PurePath(name).parts[-len(parts) :] == parts)
        for name in served_names
    )


def _check_model(
    model: object, served_names: Sequence[str] | None, adapters: Collection[str]
) -> None:
    if model is None:
        return
    if not isinstance(model, str):
        raise invalid(f"body.model is {format_value(model)}; it must be a string")
    if served_names is None:
        return
    if model not in adapters and not is_served(model, served_names):
        names = printable(listed((*served_names, *adapters)), 200)
        raise RowError(
            "unknown_model",
            f"body.model is {format_value(model)}, but this job runs {names}; to "
            "give the model another name, set model.served_model_name",
        )


def _messages(body: Mapping[str, Any]) -> tuple[str, Any]:
    if "prompt" in body:
        raise invalid(f"body.prompt cannot be used with {CHAT}; give messages")
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise invalid(f"body.messages is {format_value(messages)}; it must be a list of messages")
    return "messages", messages


def _prompt(body: Mapping[str, Any]) -> tuple[str, Any]:
    if "messages" in body:
        raise invalid(f"body.messages cannot be used with {COMPLETIONS}; give a prompt")
    return one_prompt(body, "prompt")


def one_prompt(body: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """Return the prompt in a field of a body, with its source: ``prompt`` or ``token_ids``. Raise
    RowError (``invalid_request``) if the field holds no prompt."""
    value = body.get(name)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return "prompt", value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return "token_ids", value
    raise invalid(
        f"body.{name} is {format_value(value)}; it must be a string, a list of "
        "token ids, or a list with one of these"
    )


def check_fields(
    body: Mapping[str, Any], known: Sequence[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise RowError (``unsupported_parameter``) for unknown fields, and for values of ``neutral``
    fields that ``neutral`` does not list."""
    for name, value in body.items():
        if name in neutral:
            if not any(type(value) is type(v) and value == v for v in neutral[name]):
                raise RowError(
                    "unsupported_parameter",
                    f"body.{name} is {format_value(value)}, which is not supported",
                )
        elif name not in known:
            raise unsupported(printable(name, 60), did_you_mean(name, known))


def _tools(body: Mapping[str, Any], *, is_chat: bool, has_tools: bool) -> RowTools | None:
    choice = body.get("tool_choice")
    if not body.get("tools"):
        if choice in (None, "none", "auto"):
            return None
        raise invalid(f"body.tool_choice is {format_value(choice)}, but the request has no tools")
    if not is_chat:
        raise RowError("unsupported_parameter", f"body.tools cannot be used with {COMPLETIONS}")
    if not has_tools and choice != "none":
        need = "output.tool_parser: auto in the job file, or run-batch --tool-call-parser auto"
        raise RowError("unsupported_parameter", f"body.tools needs {need}")
    try:
        tools = row_tools(body["tools"], choice, "body")
    except RowError as error:
        raise invalid(error.message) from None
    several = body.get("parallel_tool_calls", True)
    return None if tools is None else replace(tools, several=several)


def _with_argument_values(message: Any) -> Any:
    """Decode the arguments of a message's tool calls from JSON, as chat templates expect."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_values(call) for call in calls]}


def _with_values(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        values = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": values}}


def _echo(body: Mapping[str, Any], *, is_chat: bool) -> bool:
    echo = _flag(body, "echo")
    if echo and is_chat:
        raise RowError("unsupported_parameter", f"body.echo cannot be used with {CHAT}")
    return echo


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise _bad(f"{name} is {format_value(value)}; it must be true or false")
    return value


def _template_variables(body: Mapping[str, Any], *, is_chat: bool) -> Mapping[str, Any]:
    variables = body.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        what = f"chat_template_kwargs is {format_value(variables)}"
        raise invalid(f"body.{what}; it must be an object")
    if taken := sorted(RESERVED_KWARGS & set(variables)):
        raise invalid(
            f"body.chat_template_kwargs cannot contain {listed(taken)}, which batchinfer sets"
        )
    effort = body.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid(f"body.reasoning_effort is {format_value(effort)}; it must be a string")
    merged = {**variables, **({} if effort is None else {"reasoning_effort": effort})}
    if merged and not is_chat:
        raise invalid(
            f"body.{next(iter(merged))} can only be used with {CHAT}, because "
            f"{COMPLETIONS} has no chat template"
        )
    return merged


def _chat_logprobs(body: Mapping[str, Any]) -> Any:
    """Return the number of alternatives per token; None unless ``logprobs`` is true."""
    wanted, top = _flag(body, "logprobs"), body.get("top_logprobs")
    if top is not None and not wanted:
        raise _bad("top_logprobs needs logprobs: true")
    if top is not None and (type(top) is not int or not 0 <= top <= MAX_LOGPROBS):
        raise _bad(f"top_logprobs is {format_value(top)}; it must be from 0 to {MAX_LOGPROBS}")
    return (0 if top is None else top) if wanted else None


def _completion_logprobs(body: Mapping[str, Any]) -> Any:
    """Return the number of alternatives per token; None if ``logprobs`` is not set."""
    if "top_logprobs" in body:
        raise _bad(f"top_logprobs cannot be used with {COMPLETIONS}; set logprobs to a number")
    wanted = body.get("logprobs")
    if isinstance(wanted, bool):
        raise _bad(f"logprobs is {format_value(wanted)}; for {COMPLETIONS} it must be a number")
    return wanted


def invalid(message: str) -> RowError:
    """Make the error for a line that is not a valid request."""
    return RowError("invalid_request", message)


def unsupported(name: str, hint: str = "") -> RowError:
    """Make the error for a field of the body that is not supported."""
    return RowError("unsupported_parameter", f"body.{name} is not supported{hint}")


def _bad(message: str) -> RowError:
    return RowError("bad_sampling_params", f"body: {message}")
