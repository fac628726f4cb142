"""Row templates: Jinja2 over the columns of one row, in the sandbox."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jinja2
from jinja2 import meta, nodes

from batchinfer.errors import UsageError
from batchinfer.text.sandbox import PromptEnvironment, UncomputedCode, render_template


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
        except jinja2.TemplateError as error:
            line = (
                f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            )
            raise UsageError(
                f"{key} is not a valid Jinja2 template{line}: {error.message}"
            ) from error

    def columns(self, available: frozenset[str] | None = None) -> frozenset[str]:
        """Columns the template reads.

        A name Jinja2 itself defines (``range``), or that the template sets where a condition holds,
        is a column only if it is in ``available``.
        """
        others = self._names & (self._may_be_set | set(_environment().globals))
        return self._names - (others - (available or frozenset()))

    def render(self, row: Mapping[str, object]) -> str:
        """The text for ``row``.

        Raises:
            RowError: ``template_error``, naming the column where one is undefined.
        """
        return render_template(self._template, row, self.key)


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
