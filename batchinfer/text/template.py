"""Row templates: Jinja2 over the columns of one row, in the sandbox.

A column is a variable; ``row`` holds all of them, so that ``row['prompt text']`` is one whose name
is no variable's. Data with a column called ``row`` has that one instead.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import jinja2
from jinja2 import meta, nodes

from batchinfer.errors import UsageError
from batchinfer.text.sandbox import PromptEnvironment, UncomputedCode, render_template

_ROW = "row"
_WORDS = re.compile(r"\{\{-?\s*\w+( +\w+)+\s*-?\}\}")
"""What may be meant for a column whose name has blanks."""


@functools.cache
def _environment() -> PromptEnvironment:
    return PromptEnvironment(undefined=jinja2.StrictUndefined)


@functools.cache
def _name_environment() -> PromptEnvironment:
    """An environment that finds names only: without globals, a column may be called ``range``."""
    environment = PromptEnvironment()
    environment.globals.clear()
    return environment


class _Names(UncomputedCode, meta.TrackingCodeGenerator):
    """What ``meta.find_undeclared_variables`` finds names with."""


class RowTemplate:
    """A compiled row template. Text of the row is never itself taken for a template."""

    def __init__(self, source: str, key: str) -> None:
        """Compile ``source``; ``key`` is the job file's key that holds it, for messages.

        Raises:
            UsageError: the template has a syntax error or reaches for Python's internals.
        """
        self.key = key
        try:
            self._template = _environment().compile_template(source)
            tree = _name_environment().parse(source)
            _refuse_other_templates(tree)
            names = _Names(_name_environment())
            names.visit(tree)
            self._names = frozenset(names.undeclared_identifiers)
            self._may_be_set = _assigned(tree)
            self._named_in_row, self._takes_whole_row = _columns_of_row(tree)
        except jinja2.TemplateError as error:
            line = (
                f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            )
            raise UsageError(
                f"{key} is not a valid Jinja2 template{line}: {error.message}",
                hint="a column with a blank in its name is row['its name']"
                if _WORDS.search(source)
                else None,
            ) from error

    def columns(self, available: frozenset[str] | None = None) -> frozenset[str]:
        """Columns the template reads.

        A name Jinja2 itself defines (``range``), or that the template sets where a condition holds,
        is a column only if it is in ``available``.
        """
        known = available or frozenset()
        others = self._names & (self._may_be_set | set(_environment().globals))
        names = self._names - (others - known)
        if _ROW not in names - known:
            return names
        return names - {_ROW} | self._named_in_row | (known if self._takes_whole_row else set())

    def render(self, row: Mapping[str, object]) -> str:
        """The text for ``row``.

        Raises:
            RowError: ``template_error``, naming the column where one is undefined.
        """
        return render_template(self._template, {_ROW: row, **row}, self.key)


def _columns_of_row(tree: nodes.Template) -> tuple[frozenset[str], bool]:
    """Columns that a template reads as ``row["name"]`` or ``row.name``, and whether it reads
    ``row`` in any other way: then it may be any."""
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


def _assigned(tree: nodes.Template) -> frozenset[str]:
    """Names that a template sets somewhere."""
    names = tree.find_all(nodes.Name)
    return frozenset(name.name for name in names if name.ctx != "load")


def _refuse_other_templates(tree: nodes.Template) -> None:
    """A row template has no other templates to load."""
    loading = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    for node in tree.find_all(loading):
        tag = {"FromImport": "from"}.get(type(node).__name__, type(node).__name__.lower())
        reason = f"{{% {tag} %}} has no other template to load; write its text here"
        raise jinja2.TemplateSyntaxError(reason, node.lineno)


def compile_template(source: str, key: str = "prompt.template") -> RowTemplate:
    """Compile a row template.

    Raises:
        UsageError: the template has a syntax error or reaches for Python's internals.
    """
    return RowTemplate(source, key)
