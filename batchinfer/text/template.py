"""Row templates: Jinja2 over the columns of one row, in the sandbox.

Each column is a variable. ``row`` has all of them, for names that are not identifiers:
``row['prompt text']``. A column called ``row`` takes precedence.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import jinja2
from jinja2 import meta, nodes

from batchinfer.errors import UsageError
from batchinfer.text.sandbox import (
    PromptEnvironment,
    UncomputedCode,
    error_line,
    render_template,
)

_ROW = "row"
_WORDS = re.compile(r"\{\{-?\s*\w+( +\w+)+\s*-?\}\}")
"""Probably a column whose name contains spaces."""


@functools.cache
def _environment() -> PromptEnvironment:
    return PromptEnvironment(undefined=jinja2.StrictUndefined)


@functools.cache
def _name_environment() -> PromptEnvironment:
    """An environment to find names with, without globals: a column may be called ``range``."""
    environment = PromptEnvironment()
    environment.globals.clear()
    return environment


class _Names(UncomputedCode, meta.TrackingCodeGenerator):
    """Finds names, like ``meta.find_undeclared_variables``."""


class RowTemplate:
    """A compiled row template. Text of the row is never taken for a template."""

    def __init__(self, source: str, key: str) -> None:
        """Compile ``source``; ``key`` is the job file's key that holds it, for messages.

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
        others = self._names & (self._may_be_set | set(_environment().globals))
        names = self._names - (others - known)
        if _ROW not in names - known:
            return names
        return names - {_ROW} | self._named_in_row | (known if self._takes_whole_row else set())

    def render(self, row: Mapping[str, object]) -> str:
        """Return the text for ``row``.

        Raises:
            RowError: ``template_error``, naming the column where one is undefined.
        """
        return render_template(self._template, {_ROW: row, **row}, self.key)


def _columns_of_row(tree: nodes.Template) -> tuple[frozenset[str], bool]:
    """Return the columns read as ``row["name"]`` or ``row.name``.

    Also return whether ``row`` is used in any other way, so that the template may read all columns.
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
    """Refuse tags that load other templates, because a row template has none."""
    loading = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    for node in tree.find_all(loading):
        tag = {"FromImport": "from"}.get(type(node).__name__, type(node).__name__.lower())
        reason = f"{{% {tag} %}} cannot load another template; write its text here"
        raise jinja2.TemplateSyntaxError(reason, node.lineno)
