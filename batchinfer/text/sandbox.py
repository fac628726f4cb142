"""Jinja2 in a sandbox whose memory and time are bounded, for row and for chat templates.

Jinja2's own sandbox blocks Python's internals. Added here: every loop turn and macro call, every
piece of output and every growing string operation is charged to the render it belongs to.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from batchinfer.errors import RowError
from batchinfer.text import size_bounds
from batchinfer.text.size_bounds import MAX_TEXT_CHARS

MAX_SOURCE_CHARS = 2**20
MAX_STEPS = 1_000_000
"""Loop turns, macro calls and output expressions of one render."""
MAX_CPU_SECONDS = 5.0
"""Of the rendering thread, so that a busy or suspended machine changes nothing."""
_MAX_CHARS_HANDLED = 4 * MAX_TEXT_CHARS  # text may pass through a few macros or set blocks
_MAX_MESSAGE_CHARS = 300
_JOINING_FILTER = "join"


class TemplateCostError(jinja2.TemplateRuntimeError):
    """The template would build too much or run too long."""


@dataclass(slots=True)
class _Budget:
    """Budget of one render: loop turns, characters and processor time."""

    steps: int = field(default_factory=lambda: MAX_STEPS)
    chars: int = _MAX_CHARS_HANDLED
    deadline: float = field(default_factory=lambda: time.thread_time() + MAX_CPU_SECONDS)

    def spend(self, chars: int) -> None:
        self.steps -= 1
        self.chars -= chars
        if self.chars < 0:
            raise TemplateCostError(f"the result is over {MAX_TEXT_CHARS} characters")
        if self.steps < 0 or time.thread_time() > self.deadline:
            raise TemplateCostError("it runs too long: an endless or a very large loop?")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


@contextmanager
def _new_budget() -> Iterator[None]:
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def _require_small(size: int) -> None:
    if size > MAX_TEXT_CHARS:
        raise TemplateCostError(f"it builds a value of over {MAX_TEXT_CHARS} characters")


def _joined(pieces: Iterable[str]) -> str:
    kept: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        _require_small(size)
        kept.append(piece)
    return "".join(kept)


def _bounded_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """``filter_`` with the size of its result checked before it runs."""
    skipped = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @functools.wraps(filter_)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        context, (value, *rest) = args[:skipped], args[skipped:]
        if name == _JOINING_FILTER:
            value = list(value)
        _require_small(size_bounds.FILTERS[name](value, *rest, **kwargs))
        return filter_(*context, value, *rest, **kwargs)

    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as prompts want it; arguments as in transformers."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Indented, nested items take more room than the sandbox foresees; and json is slow then anyway.
    return encoder.encode(value) if indent is None else _joined(encoder.iterencode(value))


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


class _PlainNamespace(Namespace):
    """A namespace that cannot hold names of Python's internals, and prints as its name."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.TemplateRuntimeError(f"namespace attributes may not start with _: {name}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the assistant said; here, no more."""

    tags = {"generation"}  # noqa: RUF012 (Jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with its charges. Thread-safe: each render has its own budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
            optimized=False,  # nothing is computed while compiling
            finalize=_charge_output,
            **options,
        )
        self.filters["tojson"] = _tojson
        for name in size_bounds.UNSAFE_FILTERS:
            del self.filters[name]
        for name in size_bounds.FILTERS:
            self.filters[name] = _bounded_filter(name, self.filters[name])
        del self.globals["lipsum"]
        self.globals["namespace"] = _PlainNamespace
        self.globals["raise_exception"] = _raise_exception

    def charge(self, chars: int) -> str:
        """Charge a loop turn or macro call that may write ``chars`` of template text."""
        _budget.get().spend(chars)
        return "charged"

    def concatenate(self, *parts: Any) -> str:
        """The ``~`` operator."""
        _require_small(size_bounds.text_size(parts))
        return "".join(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the size of the result before computing it."""
        if not size_bounds.check_binary(operator, left, right):
            raise TemplateCostError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse, besides internals, methods whose result has no bound."""
        return attr not in size_bounds.UNSAFE_METHODS and super().is_safe_attribute(
            obj, attr, value
        )

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Check the size of what a text's methods build before calling them."""
        method = getattr(obj, "__wrapped__", obj)
        text = getattr(method, "__self__", None)
        if isinstance(text, str | bytes) and (size := size_bounds.METHODS.get(method.__name__)):
            if method.__name__ == _JOINING_FILTER and args:
                args = (list(args[0]), *args[1:])
            _require_small(size(text, *args, **kwargs))
        return super().call(context, obj, *args, **kwargs)

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile ``source`` with its charges.

        Raises:
            jinja2.TemplateError: syntax errors, and reaching for a private attribute.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise jinja2.TemplateError(f"the template is over {MAX_SOURCE_CHARS} characters")
        try:
            tree = self.parse(source)
            _refuse_private(tree)
            _add_charges(tree)
            tree.set_environment(self)
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


def _add_charges(tree: nodes.Template) -> None:
    """Make every loop turn, macro call and ``~`` go through the environment's checks."""
    _replace_concat(tree)
    for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        charge = _call("charge", [nodes.Const(literal)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            turn = _call("charge", [nodes.Const(0)], node.lineno)
            node.test = nodes.And(turn, node.test, lineno=node.lineno)


def _replace_concat(node: nodes.Node) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_without_concat(item) for item in value])
        else:
            setattr(node, name, _without_concat(value))


def _without_concat(item: Any) -> Any:
    if isinstance(item, nodes.Node):
        _replace_concat(item)
        if isinstance(item, nodes.Concat):
            return _call("concatenate", item.nodes, item.lineno)
    return item


def _call(name: str, args: Iterable[nodes.Expr], lineno: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(function, list(args), [], None, None, lineno=lineno)


@pass_context
def _charge_output(context: Context, value: Any) -> Any:
    """Charge the text of a ``{{ }}``, wherever it then goes."""
    size = size_bounds.text_size(value)
    _require_small(size)
    _budget.get().spend(size)
    return value


def render_bounded(template: jinja2.Template, variables: Mapping[str, object], what: str) -> str:
    """Render ``template`` within its budget.

    Raises:
        RowError: ``template_error``, saying what failed in ``what`` (e.g. ``prompt.template``).
    """
    try:
        with _new_budget():
            return _joined(template.generate(variables))
    # A template can raise anything: it calls methods of whatever the row holds.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
        raise RowError("template_error", f"{what}: {reason}") from error
