"""A line of an OpenAI batch file as a prompt and sampling parameters, by their names here.

What changes the answer is either done or refused: a field that is not known, or whose value asks
for what there is not, makes the line an error. Fields that change nothing are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from batchinfer.config import MAX_LOGPROBS, SamplingParams, field_names
from batchinfer.console.format import did_you_mean, format_value, listed, printable
from batchinfer.errors import RowError
from batchinfer.job.input.formats.openai_prompts import CHAT, COMPLETIONS, PROMPT_INDEX
from batchinfer.text.chat import RESERVED_KWARGS
from batchinfer.text.tools.row_tools import RowTools, row_tools

ANSWER_FIELDS = {
    "column messages": "body.messages",
    "column prompt": "body.prompt",
    "column token_ids": "body.prompt",
    "column tools": "body.tools",
}
"""What errors call the columns of prompts, and what requests for answers call them."""
_LINE = ("custom_id", "method", "url", "body")
_NO_EFFECT = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "priority", "request_id", "stream_options"),
    "guided_decoding_backend",
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (True,),
}
"""Fields of features that are not built, and their values that do not ask for them."""
_GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""vLLM's fields that are keys of ``structured_outputs``."""
_OWN = (
    *("messages", "prompt", "best_of", "logprobs", "top_logprobs", "tools", "tool_choice", "echo"),
    *("chat_template_kwargs", "reasoning_effort", *_GUIDED),
)
_SAMPLING = {*field_names(SamplingParams), "max_completion_tokens", "response_format"}
_SAMPLING -= {"prompt_logprobs", "logprobs"}  # the first has no place in the answer
_KNOWN = (*_OWN, *sorted(_SAMPLING), *_NO_EFFECT, *_NEUTRAL)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Prompt, sampling parameters and model of a request."""

    source: str
    """``messages``, ``tools`` (messages, with these), ``prompt`` or ``token_ids``."""
    value: Any
    """Of that; of several prompts each is a request."""
    sampling: Mapping[str, Any]
    """Fields of ``SamplingParams`` that the line gives."""
    model: str | None = None
    tools: RowTools | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template gets besides the messages."""


def parse_request(
    line: Mapping[str, Any],
    served_names: Sequence[str] | None,
    adapters: Collection[str] = (),
    *,
    has_tools: bool = False,
) -> ParsedRequest:
    """Prompt, sampling parameters and model that a line asks for.

    Args:
        line: the object in the line.
        served_names: what a body's ``model`` may be; None: anything.
        adapters: what it may be as well, in full.
        has_tools: whether the job reads calls of tools.

    Raises:
        RowError: ``invalid_request``, ``unknown_model``, ``unsupported_parameter``,
            ``bad_sampling_params``, ``empty_prompt``, ``unsupported_content``.
    """
    body = checked_body(line)
    check_model(body.get("model"), served_names, adapters)
    given = {name: value for name, value in body.items() if value is not None}
    is_chat = line["url"] == CHAT
    source, value = _messages(given) if is_chat else _prompt(given)
    _check_known(given)
    sampling = {name: value for name, value in given.items() if name in _SAMPLING}
    if sampling.get("max_tokens") == sampling.get("max_completion_tokens"):
        sampling.pop("max_completion_tokens", None)
    logprobs = _chat_logprobs(given) if is_chat else _completion_logprobs(given)
    echo = _echo(given, is_chat=is_chat)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
        if echo:
            sampling["prompt_logprobs"] = logprobs
    guided = {key: given[name] for name, key in _GUIDED.items() if name in given}
    if guided and "structured_outputs" in sampling:
        raise _bad("structured_outputs and guided_... are given; keep one")
    if guided:
        sampling["structured_outputs"] = guided
    _check_best_of(given)
    tools = _tools(given, is_chat=is_chat, has_tools=has_tools)
    if has_tools and is_chat:
        value = [_with_argument_values(message) for message in value]
        source = source if tools is None else "tools"
    variables = _template_variables(given, is_chat=is_chat)
    return ParsedRequest(source, value, sampling, given.get("model"), tools, variables)


def is_served(model: str, served_names: Sequence[str]) -> bool:
    """Whether ``model`` is one of the names, or the last parts of one, like a folder's name."""
    asked = PurePath(model).parts
    return any(
        model == name or (asked and PurePath(name).parts[-len(asked) :] == asked)
        for name in served_names
    )


def checked_body(
    line: Mapping[str, Any], urls: Sequence[str] = (CHAT, COMPLETIONS)
) -> Mapping[str, Any]:
    """The body of a line that is a request to one of ``urls``.

    Raises:
        RowError: ``invalid_request``.
    """
    for name in line:
        if name not in _LINE:
            raise invalid(f"unknown field {format_value(name)}{did_you_mean(name, _LINE)}")
    body = line.get("body")
    if line.get("method") != "POST":
        raise invalid(f"method is {format_value(line.get('method'))}; it must be POST")
    if line.get("url") not in urls:
        raise invalid(
            f"url is {format_value(line.get('url'))}; it must be {' or '.join(urls)} as in the "
            "rest of the file: put requests of other kinds into a file of their own"
        )
    if not isinstance(body, Mapping):
        raise invalid(f"body is {format_value(body)}; it must be an object")
    if type(body.get(PROMPT_INDEX, 0)) is not int:
        raise RowError("unsupported_parameter", f"body.{PROMPT_INDEX} is not supported")
    return {name: value for name, value in body.items() if name != PROMPT_INDEX}


def check_model(
    model: object, served_names: Sequence[str] | None, adapters: Collection[str]
) -> None:
    """Check the ``model`` of a body, as ``parse_request`` says.

    Raises:
        RowError: ``invalid_request``, ``unknown_model``.
    """
    if model is None:
        return
    if not isinstance(model, str):
        raise invalid(f"body.model is {format_value(model)}; it must be a text")
    if served_names is None:
        return
    if model not in adapters and not is_served(model, served_names):
        names = printable(listed((*served_names, *adapters)), 200)
        raise RowError(
            "unknown_model",
            f"body.model is {format_value(model)}, and this job runs {names}; "
            "model.served_model_name gives it other names",
        )


def _messages(body: Mapping[str, Any]) -> tuple[str, Any]:
    if "prompt" in body:
        raise invalid(f"body.prompt is not for {CHAT}; give messages")
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise invalid(f"body.messages is {format_value(messages)}; it must be a list of messages")
    return "messages", messages


def _prompt(body: Mapping[str, Any]) -> tuple[str, Any]:
    if "messages" in body:
        raise invalid(f"body.messages is not for {COMPLETIONS}; give a prompt")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return "prompt", prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return "token_ids", prompt
    raise invalid(
        f"body.prompt is {format_value(prompt)}; it must be a text or a list of token ids, or a "
        "list of such"
    )


def _check_known(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _NEUTRAL:
            if not any(type(value) is type(v) and value == v for v in _NEUTRAL[name]):
                raise RowError(
                    "unsupported_parameter", f"body.{name} is {format_value(value)}: not supported"
                )
        elif name not in _KNOWN:
            raise RowError(
                "unsupported_parameter",
                f"body.{printable(name, 60)} is not supported{did_you_mean(name, _KNOWN)}",
            )


def _tools(body: Mapping[str, Any], *, is_chat: bool, has_tools: bool) -> RowTools | None:
    """The tools of a request; None where it has none, or must call none."""
    choice = body.get("tool_choice")
    if not body.get("tools"):
        if choice in (None, "none", "auto"):
            return None
        raise invalid(f"body.tool_choice is {format_value(choice)}, and there are no tools")
    if not is_chat:
        raise RowError("unsupported_parameter", f"body.tools is not for {COMPLETIONS}")
    if not has_tools and choice != "none":
        need = "output.tool_parser: auto of the job, or run-batch --tool-call-parser auto"
        raise RowError("unsupported_parameter", f"body.tools needs {need}")
    try:
        tools = row_tools(body["tools"], choice, "body")
    except RowError as error:
        raise invalid(error.message) from None
    several = body.get("parallel_tool_calls", True)
    return None if tools is None else replace(tools, several=several)


def _with_argument_values(message: Any) -> Any:
    """A message whose calls have their arguments as values, not as JSON: templates write them."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_values(call) for call in calls]}


def _with_values(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    try:
        values = json.loads(arguments or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": values}}


def _check_best_of(body: Mapping[str, Any]) -> None:
    if "best_of" in body and body["best_of"] != body.get("n", 1):
        raise RowError(
            "unsupported_parameter", "body.best_of is not supported; leave it out, and set n"
        )


def _echo(body: Mapping[str, Any], *, is_chat: bool) -> bool:
    """Whether the answer is to begin with the prompt."""
    echo = body.get("echo", False)
    if not isinstance(echo, bool):
        raise _bad(f"echo is {format_value(echo)}; it must be true or false")
    if echo and is_chat:
        raise RowError("unsupported_parameter", f"body.echo is not for {CHAT}")
    return echo


def _template_variables(body: Mapping[str, Any], *, is_chat: bool) -> Mapping[str, Any]:
    """What a request hands to the chat template, ``reasoning_effort`` under its own name."""
    variables = body.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        what = f"chat_template_kwargs is {format_value(variables)}"
        raise invalid(f"body.{what}; it must be an object")
    if taken := sorted(RESERVED_KWARGS & set(variables)):
        raise invalid(
            f"body.chat_template_kwargs cannot hold {listed(taken)}, which are set for each request"
        )
    effort = body.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid(f"body.reasoning_effort is {format_value(effort)}; it must be a text")
    found = {**variables, **({} if effort is None else {"reasoning_effort": effort})}
    if found and not is_chat:
        raise invalid(f"body.{next(iter(found))} is for {CHAT}: {COMPLETIONS} has no chat template")
    return found


def _chat_logprobs(body: Mapping[str, Any]) -> Any:
    """Alternatives per token; None: no log-probabilities. ``logprobs`` switches them on."""
    wanted, top = body.get("logprobs", False), body.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise _bad(f"logprobs is {format_value(wanted)}; it must be true or false")
    if top is not None and not wanted:
        raise _bad("top_logprobs needs logprobs: true")
    if top is not None and (type(top) is not int or not 0 <= top <= MAX_LOGPROBS):
        raise _bad(f"top_logprobs is {format_value(top)}; it must be 0 to {MAX_LOGPROBS}")
    return (0 if top is None else top) if wanted else None


def _completion_logprobs(body: Mapping[str, Any]) -> Any:
    """Alternatives per token, which is what ``logprobs`` says; None: no log-probabilities."""
    if "top_logprobs" in body:
        raise _bad(f"top_logprobs is not for {COMPLETIONS}; give logprobs a number")
    wanted = body.get("logprobs")
    if isinstance(wanted, bool):
        raise _bad(f"logprobs is {format_value(wanted)}; for {COMPLETIONS} it must be a number")
    return wanted


def invalid(message: str) -> RowError:
    """The error of a line that is no request."""
    return RowError("invalid_request", message)


def _bad(message: str) -> RowError:
    return RowError("bad_sampling_params", f"body: {message}")
