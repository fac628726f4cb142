"""Sources of a row's prompt: a column, a template, or a conversation of templates.

Also which settings of it contradict each other, whatever the data and the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from batchinfer.config import PromptConfig
from batchinfer.errors import DataError, RowError, UsageError
from batchinfer.near_names import meant
from batchinfer.text.chat import RESERVED_KWARGS, Message
from batchinfer.text.row_values import as_messages, require_content
from batchinfer.text.template import RowTemplate
from batchinfer.text.tools.row_tools import checked_choice, checked_tools

_MAX_COLUMNS_SHOWN = 20
_DEFAULT_COLUMNS = ("messages", "prompt")


class PromptSource(Protocol):
    """Source of a row's text or conversation."""

    columns: frozenset[str]
    """The input columns it reads."""

    def read(self, values: Mapping[str, Any]) -> str | list[Message]:
        """The text or conversation of a row.

        Raises:
            RowError: ``empty_prompt``, ``template_error``, ``unsupported_content``.
        """
        ...


class ColumnSource:
    """A column of strings, or of conversations."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.columns = frozenset((name,))

    def read(self, values: Mapping[str, Any]) -> str | list[Message]:
        """The column's value, a string or a conversation."""
        value = values.get(self.name)
        where = f"column {self.name}"
        if value is None:
            raise RowError("empty_prompt", f"{where} is null")
        if isinstance(value, str):
            return _require_text(value, where)
        if isinstance(value, list):
            return as_messages(value, self.name)
        kind = type(value).__name__
        raise RowError("unsupported_content", f"{where}: {kind} is no text and no conversation")


class TemplateSource:
    """One text, rendered from the row's columns."""

    def __init__(self, source: str, available: frozenset[str]) -> None:
        self._template = checked_template(source, "prompt.template", available)
        self.columns = self._template.columns(available)

    def read(self, values: Mapping[str, Any]) -> str:
        """The rendered text."""
        return _require_text(self._template.render(values), self._template.key)


class MessagesSource:
    """A conversation whose contents are rendered from the row's columns."""

    def __init__(self, messages: Sequence[Mapping[str, str]], available: frozenset[str]) -> None:
        self._messages: list[tuple[str, RowTemplate]] = []
        for index, message in enumerate(messages):
            key = f"prompt.messages[{index}]"
            if set(message) != {"role", "content"}:
                raise UsageError(f"{key} must have role and content, and nothing else")
            template = checked_template(message["content"], f"{key}.content", available)
            self._messages.append((message["role"], template))
        self.columns = frozenset().union(
            *(template.columns(available) for _, template in self._messages)
        )

    def read(self, values: Mapping[str, Any]) -> list[Message]:
        """The conversation, contents rendered."""
        messages: list[Message] = [
            {"role": role, "content": template.render(values)} for role, template in self._messages
        ]
        require_content(messages, "prompt.messages")
        return messages


def make_source(config: PromptConfig, columns: Sequence[str]) -> PromptSource:
    """The source that ``config`` names, or the default for data with ``columns``.

    Raises:
        UsageError: a template is invalid or reads a column that the data does not have; no source
            is given and the data has no default column.
        DataError: the data does not have the column.
    """
    available = frozenset(columns)
    if config.template is not None:
        return TemplateSource(config.template, available)
    if config.messages is not None:
        return MessagesSource(config.messages, available)
    if config.column is not None:
        require_column(config.column, "prompt.column", columns)
        return ColumnSource(config.column)
    for name in _DEFAULT_COLUMNS:
        if name in available:
            return ColumnSource(name)
    raise UsageError(
        f"the data has no column messages or prompt; {_found(columns)}",
        hint="Say where the prompt is: prompt.column, prompt.template or prompt.messages.",
    )


def require_column(name: str, key: str, columns: Sequence[str]) -> None:
    """Check that the data has the column that ``key`` names.

    Raises:
        DataError: it does not.
    """
    if name not in columns:
        quoted = json.dumps(name, ensure_ascii=False)
        raise DataError(f"{key}: the data has no column {quoted}; {_found(columns, name)}")


def checked_template(source: str, key: str, available: frozenset[str]) -> RowTemplate:
    """A template that reads columns in ``available`` only.

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
    """The columns there are, and which of them ``name`` may have meant."""
    shown = ", ".join(columns[:_MAX_COLUMNS_SHOWN])
    more = (
        ""
        if len(columns) <= _MAX_COLUMNS_SHOWN
        else f" and {len(columns) - _MAX_COLUMNS_SHOWN} more"
    )
    question = meant(name, columns)
    asked = f"{question} " if question else ""
    return f"{asked}its columns are: {shown or '(none)'}{more}"


def conflicts(config: PromptConfig) -> Iterator[tuple[str, str]]:
    """Keys of the job file that cannot be honoured, each with why.

    Yields:
        The key, like ``prompt.system``, and the rest of a sentence about it.
    """
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
        for name, given in _text_settings(config).items():
            if given:
                why = "cannot be combined with prompt.token_ids_column, which brings finished ids"
                yield f"prompt.{name}", why
    elif config.chat_template == "none":
        for name, given in _chat_settings(config).items():
            if given:
                yield f"prompt.{name}", "needs a chat template, but prompt.chat_template is none"


def _chat_settings(config: PromptConfig) -> dict[str, bool]:
    """Settings that only a chat template can honour, and whether each is given."""
    return {
        "system": config.system is not None,
        "messages": config.messages is not None,
        "chat_template_kwargs": bool(config.chat_template_kwargs),
        "tools": config.tools is not None,
        "tools_column": config.tools_column is not None,
    }


def _text_settings(config: PromptConfig) -> dict[str, bool]:
    """Settings that turn a row into text, or text into tokens, and whether each is given."""
    return {
        "system": config.system is not None,
        "chat_template": config.chat_template not in ("auto", "none"),
        "chat_template_kwargs": bool(config.chat_template_kwargs),
        "parse_special_tokens": config.parse_special_tokens,
        "tools": config.tools is not None,
        "tools_column": config.tools_column is not None,
    }
