"""Reads the source of a row's prompt: a column, a template, or a conversation made of templates.

The module also finds contradictory settings, which it can do without the data and the model.

A row template is a Jinja2 template that is rendered in the sandbox. Each column of the row is a
variable. ``row`` holds all columns, for names that are not identifiers: ``row['prompt text']``. A
column called ``row`` takes precedence.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta, nodes

from batchinfer.config import PromptConfig
from batchinfer.errors import DataError, RowError, UsageError
from batchinfer.near_names import meant
from batchinfer.text.chat import RESERVED_KWARGS, Message
from batchinfer.text.row_values import as_messages
from batchinfer.text.sandbox import (
    PromptEnvironment,
    UncomputedCode,
    error_line,
    render_template,
)
from batchinfer.text.tools.row_tools import checked_choice, checked_tools

_MAX_COLUMNS_SHOWN = 20
_DEFAULT_COLUMNS = ("messages", "prompt")
_ROW = "row"
_WORDS = re.compile(r"\{\{-?\s*\w+( +\w+)+\s*-?\}\}")
"""Matches a template expression that is probably a column name with spaces."""


@functools.cache
def _environment() -> PromptEnvironment:
    return PromptEnvironment(undefined=jinja2.StrictUndefined)


@functools.cache
def _name_environment() -> PromptEnvironment:
    """Make an environment without globals to find column names, because a column may be called
    ``range``."""
    environment = PromptEnvironment()
    environment.globals.clear()
    return environment


class _Names(UncomputedCode, meta.TrackingCodeGenerator):
    """Finds undeclared names, like ``meta.find_undeclared_variables``."""


class RowTemplate:
    """A compiled row template. Text of a row is never parsed as a template."""

    def __init__(self, source: str, key: str) -> None:
        """Compile ``source``; ``key`` is the job file's key for the template, used in messages.

        Raises:
            UsageError: the template has a syntax error or accesses Python's internals.
        """
        self.key = key
        try:
            self._template = _environment().compile_template(source)
            tree = _name_environment().parse(source)
            _refuse_other_templates(tree)
            names = _Names(_name_environment())
            names.visit(tree)
            self._names = frozenset(names.undeclared_identifiers)
            named = tree.find_all(nodes.Name)
            self._may_be_set = frozenset(node.name for node in named if node.ctx != "load")
            self._named_in_row, self._takes_whole_row = _columns_of_row(tree)
        except jinja2.TemplateError as error:
            hint = "for a column with a space in its name, write row['its name']"
            raise UsageError(
                f"{key} is not a valid Jinja2 template{error_line(error)}: {error.message}",
                hint=hint if _WORDS.search(source) else None,
            ) from error

    def columns(self, available: frozenset[str] | None = None) -> frozenset[str]:
        """Return the columns that the template reads.

        A name that Jinja2 defines (``range``), or that the template may set itself, is a column
        only if it is in ``available``.
        """
        known = available or frozenset()
        not_columns = self._names & (self._may_be_set | set(_environment().globals))
        names = self._names - (not_columns - known)
        if _ROW not in names - known:
            return names
        return names - {_ROW} | self._named_in_row | (known if self._takes_whole_row else set())

    def render(self, row: Mapping[str, object]) -> str:
        """Return the text for ``row``.

        Raises:
            RowError: ``template_error``; the message names a column that is undefined.
        """
        return render_template(self._template, {_ROW: row, **row}, self.key)


def _columns_of_row(tree: nodes.Template) -> tuple[frozenset[str], bool]:
    """Return the columns read as ``row["name"]`` or ``row.name``.

    Also return True if ``row`` is used in any other way, so that the template may read all columns.
    """
    attributes = [
        node.attr
        for node in tree.find_all(nodes.Getattr)
        if _is_row(node.node) and not hasattr(dict, node.attr)
    ]
    items = [
        node.arg.value
        for node in tree.find_all(nodes.Getitem)
        if _is_row(node.node)
        and isinstance(node.arg, nodes.Const)
        and isinstance(node.arg.value, str)
    ]
    names, uses = [*attributes, *items], sum(map(_is_row, tree.find_all(nodes.Name)))
    return frozenset(names), uses > len(names)


def _is_row(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == _ROW and node.ctx == "load"


def _refuse_other_templates(tree: nodes.Template) -> None:
    """Refuse tags that load other templates, because a row template cannot load any."""
    loading = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    for node in tree.find_all(loading):
        tag = {"FromImport": "from"}.get(type(node).__name__, type(node).__name__.lower())
        reason = f"{{% {tag} %}} cannot load another template; copy its text here"
        raise jinja2.TemplateSyntaxError(reason, node.lineno)


@dataclass(frozen=True)
class PromptSource:
    """Reads a row's text or conversation.

    Args:
        where: name of the source in error messages.
        read: returns the text or conversation of a row, which may be empty, or raises a
            ``RowError``: ``empty_prompt`` for null, ``template_error``, ``unsupported_content``.
    """

    columns: frozenset[str]
    where: str
    read: Callable[[Mapping[str, Any]], str | list[Message]]


def _column_source(name: str) -> PromptSource:
    where = f"column {name}"

    def read(values: Mapping[str, Any]) -> str | list[Message]:
        value = values.get(name)
        if value is None:
            raise RowError("empty_prompt", f"{where} is null")
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return as_messages(value, name)
        kind = type(value).__name__
        raise RowError("unsupported_content", f"{where}: {kind} is neither text nor a conversation")

    return PromptSource(frozenset((name,)), where, read)


def _template_source(source: str, available: frozenset[str]) -> PromptSource:
    template = checked_template(source, "prompt.template", available)
    return PromptSource(template.columns(available), template.key, template.render)


def _messages_source(
    messages: Sequence[Mapping[str, str]], available: frozenset[str]
) -> PromptSource:
    templates: list[tuple[str, RowTemplate]] = []
    for index, message in enumerate(messages):
        key = f"prompt.messages[{index}]"
        if set(message) != {"role", "content"}:
            raise UsageError(f"{key} must have role and content, and nothing else")
        template = checked_template(message["content"], f"{key}.content", available)
        templates.append((message["role"], template))

    def read(values: Mapping[str, Any]) -> list[Message]:
        return [{"role": role, "content": template.render(values)} for role, template in templates]

    columns = frozenset().union(*(template.columns(available) for _, template in templates))
    return PromptSource(columns, "prompt.messages", read)


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
    name = prompt_column(config, columns)
    if name is None:
        raise UsageError(
            f"the data has no column messages or prompt; {_found(columns)}",
            hint="set prompt.column, prompt.template or prompt.messages",
        )
    require_column(name, "prompt.column", columns)
    return _column_source(name)


def prompt_column(config: PromptConfig, columns: Collection[str]) -> str | None:
    """Return the column that holds the prompts of data with ``columns``; None if templates make
    them, or if ``config`` names no column and the data has no default column."""
    if config.template is not None or config.messages is not None:
        return None
    if config.column is not None:
        return config.column
    return next((name for name in _DEFAULT_COLUMNS if name in columns), None)


def require_column(name: str, key: str, columns: Sequence[str]) -> None:
    """Raise a ``DataError`` if the data does not have the column that ``key`` names."""
    if name not in columns:
        quoted = json.dumps(name, ensure_ascii=False)
        raise DataError(f"{key}: the data has no column {quoted}; {_found(columns, name)}")


def checked_template(source: str, key: str, available: frozenset[str]) -> RowTemplate:
    """Return a template that reads only columns in ``available``.

    Raises:
        UsageError: the template is invalid, or reads another column.
    """
    template = RowTemplate(source, key)
    if missing := sorted(template.columns(available) - available):
        names, found = ", ".join(missing), _found(sorted(available), missing[0])
        raise UsageError(f"{key} reads {names}, which the data does not have; {found}")
    return template


def _found(columns: Sequence[str], name: str = "") -> str:
    """List the columns, and suggest a column whose name is similar to ``name``."""
    shown = ", ".join(columns[:_MAX_COLUMNS_SHOWN])
    hidden = len(columns) - _MAX_COLUMNS_SHOWN
    more = f" and {hidden} more" if hidden > 0 else ""
    question = meant(name, columns)
    return f"{question}{question and ' '}its columns are: {shown or '(none)'}{more}"


def conflicts(config: PromptConfig) -> Iterator[tuple[str, str]]:
    """Yield each invalid job key, with the rest of a sentence that begins with the key."""
    if config.messages is not None and not config.messages:
        yield "prompt.messages", "is empty; give at least one message"
    if config.template is not None and not config.template.strip():
        yield "prompt.template", "is empty; write the text of the prompt, like '{{ text }}'"
    if isinstance(config.tools, tuple):
        try:
            checked_choice(config.tool_choice, checked_tools(config.tools))
        except ValueError as error:
            yield "prompt.tools", f"cannot be used: {error}"
    if taken := sorted(RESERVED_KWARGS & set(config.chat_template_kwargs)):
        yield (
            "prompt.chat_template_kwargs",
            f"cannot contain {', '.join(taken)}, which batchinfer sets",
        )
    if config.token_ids_column is not None:
        allowed = {"messages"}
        why = "cannot be combined with prompt.token_ids_column, which has token ids instead of text"
    elif config.chat_template == "none":
        allowed = {"chat_template", "parse_special_tokens", "images"}
        why = "needs a chat template, but prompt.chat_template is none"
    else:
        return
    settings = {
        "system": config.system is not None,
        "messages": config.messages is not None,
        "chat_template": config.chat_template not in ("auto", "none"),
        "chat_template_kwargs": bool(config.chat_template_kwargs),
        "parse_special_tokens": config.parse_special_tokens,
        "tools": config.tools is not None,
        "tools_column": config.tools_column is not None,
        "images": config.images is not None,
    }
    for name, is_given in settings.items():
        if is_given and name not in allowed:
            yield f"prompt.{name}", why
