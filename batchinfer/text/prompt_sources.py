"""The source of a row's prompt: a column, a template, or a conversation of templates.

Also finds settings that contradict each other, regardless of data and model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchinfer.config import PromptConfig
from batchinfer.errors import DataError, RowError, UsageError
from batchinfer.near_names import meant
from batchinfer.text.chat import RESERVED_KWARGS, Message
from batchinfer.text.row_values import as_messages, require_content
from batchinfer.text.template import RowTemplate
from batchinfer.text.tools.row_tools import checked_choice, checked_tools

_MAX_COLUMNS_SHOWN = 20
_DEFAULT_COLUMNS = ("messages", "prompt")


@dataclass(frozen=True)
class PromptSource:
    """Reads a row's text or conversation.

    Args:
        columns: the input columns it reads.
        read: returns the text or conversation of a row, or raises a ``RowError``:
            ``empty_prompt``, ``template_error``, ``unsupported_content``.
    """

    columns: frozenset[str]
    read: Callable[[Mapping[str, Any]], str | list[Message]]


def _column_source(name: str) -> PromptSource:
    """Read a column of strings, or of conversations."""

    def read(values: Mapping[str, Any]) -> str | list[Message]:
        value, where = values.get(name), f"column {name}"
        if value is None:
            raise RowError("empty_prompt", f"{where} is null")
        if isinstance(value, str):
            return _require_text(value, where)
        if isinstance(value, list):
            return as_messages(value, name)
        kind = type(value).__name__
        raise RowError("unsupported_content", f"{where}: {kind} is neither text nor a conversation")

    return PromptSource(frozenset((name,)), read)


def _template_source(source: str, available: frozenset[str]) -> PromptSource:
    """Render one text from the row's columns."""
    template = checked_template(source, "prompt.template", available)
    return PromptSource(
        template.columns(available),
        lambda values: _require_text(template.render(values), template.key),
    )


def _messages_source(
    messages: Sequence[Mapping[str, str]], available: frozenset[str]
) -> PromptSource:
    """Render the contents of a conversation from the row's columns."""
    templates: list[tuple[str, RowTemplate]] = []
    for index, message in enumerate(messages):
        key = f"prompt.messages[{index}]"
        if set(message) != {"role", "content"}:
            raise UsageError(f"{key} must have role and content, and nothing else")
        template = checked_template(message["content"], f"{key}.content", available)
        templates.append((message["role"], template))

    def read(values: Mapping[str, Any]) -> list[Message]:
        rendered: list[Message] = [
            {"role": role, "content": template.render(values)} for role, template in templates
        ]
        require_content(rendered, "prompt.messages")
        return rendered

    columns = frozenset().union(*(template.columns(available) for _, template in templates))
    return PromptSource(columns, read)


def make_source(config: PromptConfig, columns: Sequence[str]) -> PromptSource:
    """Return the source that ``config`` names, or the default for data with ``columns``.

    Raises:
        UsageError: a template is invalid or reads a missing column; ``config`` names no source,
            and the data has no default column.
        DataError: a column is missing.
    """
    available = frozenset(columns)
    if config.template is not None:
        return _template_source(config.template, available)
    if config.messages is not None:
        return _messages_source(config.messages, available)
    if config.column is not None:
        require_column(config.column, "prompt.column", columns)
        return _column_source(config.column)
    for name in _DEFAULT_COLUMNS:
        if name in available:
            return _column_source(name)
    raise UsageError(
        f"the data has no column messages or prompt; {_found(columns)}",
        hint="Say where the prompt is: prompt.column, prompt.template or prompt.messages.",
    )


def require_column(name: str, key: str, columns: Sequence[str]) -> None:
    """Raise a ``DataError`` if the data does not have the column that ``key`` names."""
    if name not in columns:
        quoted = json.dumps(name, ensure_ascii=False)
        raise DataError(f"{key}: the data has no column {quoted}; {_found(columns, name)}")


def checked_template(source: str, key: str, available: frozenset[str]) -> RowTemplate:
    """Return a template that reads only columns in ``available``.

    Raises:
        UsageError: it is invalid, or reads another column.
    """
    template = RowTemplate(source, key)
    if missing := sorted(template.columns(available) - available):
        names, found = ", ".join(missing), _found(sorted(available), missing[0])
        raise UsageError(f"{key} reads {names}, not in the data; {found}")
    return template


def _require_text(text: str, where: str) -> str:
    if not text.strip():
        raise RowError("empty_prompt", f"{where} is empty or whitespace only")
    return text


def _found(columns: Sequence[str], name: str = "") -> str:
    """List the columns, and suggest the one that ``name`` may have meant."""
    shown = ", ".join(columns[:_MAX_COLUMNS_SHOWN])
    hidden = len(columns) - _MAX_COLUMNS_SHOWN
    more = f" and {hidden} more" if hidden > 0 else ""
    question = meant(name, columns)
    return f"{question}{question and ' '}its columns are: {shown or '(none)'}{more}"


def conflicts(config: PromptConfig) -> Iterator[tuple[str, str]]:
    """Yield invalid keys of the job file, each with the predicate of a sentence about it."""
    if config.messages is not None and not config.messages:
        yield "prompt.messages", "is empty; give at least one message"
    if config.template is not None and not config.template.strip():
        yield "prompt.template", "is empty; write what the prompt should say, like '{{ text }}'"
    if isinstance(config.tools, tuple):
        try:
            checked_choice(config.tool_choice, checked_tools(config.tools))
        except ValueError as error:
            yield "prompt.tools", f"cannot be used: {error}"
    if taken := sorted(RESERVED_KWARGS & set(config.chat_template_kwargs)):
        yield (
            "prompt.chat_template_kwargs",
            f"cannot hold {', '.join(taken)}, which every job sets itself",
        )
    if config.token_ids_column is not None:
        others = {"messages"}
        why = "cannot be combined with prompt.token_ids_column, which has token ids instead of text"
    elif config.chat_template == "none":
        others = {"chat_template", "parse_special_tokens"}
        why = "needs a chat template, but prompt.chat_template is none"
    else:
        return
    given = {
        "system": config.system is not None,
        "messages": config.messages is not None,
        "chat_template": config.chat_template not in ("auto", "none"),
        "chat_template_kwargs": bool(config.chat_template_kwargs),
        "parse_special_tokens": config.parse_special_tokens,
        "tools": config.tools is not None,
        "tools_column": config.tools_column is not None,
    }
    for name, is_given in given.items():
        if is_given and name not in others:
            yield f"prompt.{name}", why
