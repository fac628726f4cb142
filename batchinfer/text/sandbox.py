"""Jinja2 in a sandbox, for row templates and chat templates.

Jinja2's own sandbox protects Python's internals. This sandbox also removes randomness, and keeps
templates from changing a row's values. The sandbox limits neither time nor memory, so worker
processes with limits render the templates (``batchinfer.text.processes``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from batchinfer.errors import RowError

MAX_SOURCE_CHARS = 2**20
MAX_TEXT_CHARS = 16 * 2**20
"""Maximum length of a template's result and of a text in a row, in characters."""
_MAX_MESSAGE_CHARS = 300


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, with the same arguments as in transformers."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return encoder.encode(value)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


class _PlainNamespace(Namespace):
    """A namespace without Python's internal names, whose repr shows no memory address."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.TemplateRuntimeError(f"namespace attributes may not start with _: {name}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(Extension):
    """Ignores the tags in ``{% generation %}...{% endgeneration %}``, which mark the assistant's
    text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class UncomputedCode(CodeGenerator):
    """Compiles templates without evaluating constant expressions. Templates are compiled in the
    job's process too, but only workers limit time and memory, so a worker evaluates the expressions
    when it renders the template."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.optimizer = None

    def visit_EvalContextModifier(  # noqa: N802 (Jinja2 calls it so)
        self, node: nodes.EvalContextModifier, frame: Frame
    ) -> None:
        if not all(isinstance(option.value, nodes.Const) for option in node.options):
            raise jinja2.TemplateSyntaxError("autoescape must be true or false", node.lineno)
        super().visit_EvalContextModifier(node, frame)

    def _output_child_to_const(
        self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo
    ) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class PromptEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with the filters and tags of chat templates. Thread-safe."""

    code_generator_class = UncomputedCode

    def __init__(self, **options: Any) -> None:
        extensions = [_GenerationTag, "jinja2.ext.loopcontrols"]
        super().__init__(extensions=extensions, **options)
        self.filters["tojson"] = _tojson
        del self.filters["random"]  # prompts must be reproducible
        del self.globals["lipsum"]
        self.globals["namespace"] = _PlainNamespace
        self.globals["raise_exception"] = _raise_exception

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile ``source``.

        Raises:
            jinja2.TemplateError: the template has a syntax error or reads a private attribute.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise jinja2.TemplateError(f"the template has more than {MAX_SOURCE_CHARS} characters")
        try:
            tree = self.parse(source)
            _refuse_private(tree)
            return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))
        except RecursionError as error:
            raise jinja2.TemplateError("the template is nested too deeply") from error


def _refuse_private(tree: nodes.Template) -> None:
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        name = node.attr if isinstance(node, nodes.Getattr) else None
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            name = node.arg.value
        if isinstance(name, str) and name.startswith("__"):
            raise jinja2.TemplateSyntaxError(f"private attribute {name}", node.lineno)


def error_line(error: jinja2.TemplateError) -> str:
    """Return the line of a syntax error in parentheses; "" for other errors."""
    return f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""


def render_template(template: jinja2.Template, variables: Mapping[str, object], what: str) -> str:
    """Render a template; ``what`` is the template's name in errors, such as ``prompt.template``.

    Raises:
        RowError: ``template_error``, or an error that a value raises when it is printed.
        MemoryError: there is too little memory.
    """
    try:
        text = "".join(template.generate(variables))
    except (MemoryError, RowError):
        raise
    # A template can raise anything, because it calls methods of the row's values.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
        raise RowError("template_error", f"{what}: {reason}") from error
    if len(text) > MAX_TEXT_CHARS:
        raise RowError(
            "template_error", f"{what}: the result has more than {MAX_TEXT_CHARS} characters"
        )
    return text
