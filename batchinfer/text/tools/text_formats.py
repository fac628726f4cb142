"""Formats in which a call is Python code or a message, as vLLM's parsers (vllm/tool_parsers:
pythonic, olmo3, openai) and SGLang's (python/sglang/srt/function_call/lfm2_detector.py) read them.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchinfer.text.tools.call_grammar import (
    ANY_TEXT,
    Parameter,
    markers,
    named_grammar,
    parameter_grammar,
    quoted,
)
from batchinfer.text.tools.tool_format import (
    ParsedCalls,
    ToolCall,
    ToolFormat,
    Tools,
    json_arguments,
)

if TYPE_CHECKING:
    from batchinfer.text.tokenizer import Tokenizer


class PythonicFormat(ToolFormat):
    """``[name(key="value"), ...]`` as the whole text: Llama 3.2 and 4, Gemma 3.

    Args:
        begin, end: optional markers around the calls.
        may_be_bare: True to leave the markers out of the grammar if the tokenizer lacks them.
        has_lines: True if each call is a line, as in OLMo 3, instead of an item of a list.
    """

    def __init__(
        self, begin: str, end: str, *, may_be_bare: bool = False, has_lines: bool = False
    ) -> None:
        self._begin, self._end = begin, end
        self._may_be_bare = may_be_bare
        self._has_lines = has_lines

    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        content, found, body = text.partition(self._begin)
        if not found:
            content, body = "", text
        body = body.partition(self._end)[0].strip()
        if self._has_lines and found:
            body = f"[{', '.join(filter(None, map(str.strip, body.splitlines())))}]"
        try:
            with warnings.catch_warnings(action="ignore"):  # invalid escapes cause warnings
                tree = ast.parse(body, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        if not isinstance(tree.body, ast.List) or not tree.body.elts:
            return None
        calls = [_python_call(one) for one in tree.body.elts]
        whole = tuple(call for call in calls if call is not None)
        return ParsedCalls(content.strip(), whole) if len(whole) == len(calls) else None

    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        between = '"\\n"' if self._has_lines else '", "'
        calls = f"call ({between} call)*" if several else "call"
        if not self._has_lines:
            calls = f'"[" {calls} "]"'
        if not self._may_be_bare or tokenizer.added_token_id(self._begin) is not None:
            begin, end = markers(tokenizer, self._begin, self._end)
            calls = f"{begin} {calls} {end}"
        return parameter_grammar(tools, f"start: {calls}", _python_rule)


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's names of constants with Python's constants."""

    _VALUES = {"true": True, "false": False, "null": None}  # noqa: RUF012

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


def _python_call(node: ast.expr) -> ToolCall | None:
    """Return a call whose arguments are named literals; None for other expressions."""
    if not isinstance(node, ast.Call) or node.args:
        return None
    try:
        values = {
            str(one.arg): ast.literal_eval(_JsonNames().visit(one.value))
            for one in node.keywords
            if one.arg
        }
        # Dumping and loading joins escaped halves of surrogate pairs.
        arguments = json.dumps(json.loads(json.dumps(values)), ensure_ascii=False)
    except (ValueError, TypeError):
        return None
    is_whole = len(values) == len(node.keywords)
    return ToolCall(ast.unparse(node.func), arguments) if is_whole else None


def _python_rule(name: str, parameters: Sequence[Parameter]) -> str:
    """Return the rule of a call with its values as JSON, in the order of the parameters."""
    written = [f"{quoted(f'{one.name}=')} {one.rule}" for one in parameters]
    firsts = []
    for at, one in enumerate(parameters):  # parameters that can come first
        rest = (
            f'(", " {rule}){"" if later.is_required else "?"}'
            for rule, later in zip(written[at + 1 :], parameters[at + 1 :], strict=True)
        )
        firsts.append(" ".join([written[at], *rest]))
        if one.is_required:
            break
    else:
        firsts.append('""')
    return f'{quoted(f"{name}(")} ({" | ".join(firsts)}) ")"'


class HarmonyCalls(ToolFormat):
    """Calls that gpt-oss writes as messages to ``functions.name``; other messages are the text."""

    spans_thinking = True
    _BETWEEN = re.compile(r"<\|(?:start|end|call|return)\|>")
    _RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")

    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        calls, said = list[ToolCall](), list[str]()
        for message in self._BETWEEN.split(text):
            head, found, body = message.partition("<|message|>")
            recipient = self._RECIPIENT.search(head)
            if recipient is None:
                is_said = found and "analysis" not in head and "to=" not in head
                said += [body.strip()] if is_said else []
                continue
            arguments = json_arguments(body.strip())
            if arguments is None:
                return None
            calls.append(ToolCall(recipient[1], arguments))
        return ParsedCalls("\n".join(said), tuple(calls)) if calls else None

    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        names = ("start", "channel", "message", "end", "constrain")
        start, channel, message, end, constrain = markers(
            tokenizer, *(f"<|{name}|>" for name in names)
        )
        thought = f'{channel} "analysis" {message} ANY_TEXT {end} {start} "assistant"'

        def call(name: str, rule: str) -> str:
            recipient = quoted(f"commentary to=functions.{name} ")
            return f'{channel} {recipient} {constrain} "json" {message} {rule}'

        return named_grammar(tools, f"start: thought* call\nthought: {thought}\n{ANY_TEXT}", call)
