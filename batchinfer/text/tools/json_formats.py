"""Formats in which a call is a JSON object, as vLLM's parsers read them (vllm/tool_parsers:
hermes, mistral, llama, granite, deepseekv3, deepseekv31, kimi_k2)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batchinfer.text.tools.call_grammar import (
    marker,
    markers,
    named_grammar,
    object_grammar,
    quoted,
)
from batchinfer.text.tools.tool_format import (
    ParsedCalls,
    ToolCall,
    ToolFormat,
    Tools,
    fields_between,
    json_arguments,
)

if TYPE_CHECKING:
    from batchinfer.text.tokenizer import Tokenizer

_NAMES = {"name": "name", "arguments": "arguments"}
_LLAMA_NAMES = {"name": "name", "arguments": "parameters"}
_DECODER = json.JSONDecoder()


def call_of(value: object) -> ToolCall | None:
    """Return the call in a JSON object; None if it is malformed."""
    if not isinstance(value, Mapping):
        return None
    name = value.get("name")
    written = value["arguments"] if "arguments" in value else value.get("parameters")
    arguments = json_arguments(written)
    if not isinstance(name, str) or not name or arguments is None:
        return None
    return ToolCall(name, arguments)


def _parsed(content: str, values: list[Any]) -> ParsedCalls | None:
    calls = [call_of(value) for value in values]
    whole = tuple(call for call in calls if call is not None)
    return ParsedCalls(content.strip(), whole) if whole and len(whole) == len(calls) else None


class HermesFormat(ToolFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes 2 and 3, Qwen 2.5 and 3.

    The last end marker may be missing, for instance if it is a stop string.
    """

    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        content, *rests = text.partition(self._BEGIN)
        values, rest = list[Any](), "".join(rests)
        while rest:
            body = rest.removeprefix(self._BEGIN).lstrip()
            try:
                # Parse JSON before searching for a marker, because strings may contain markers.
                value, end = _DECODER.raw_decode(body)
            except ValueError:
                return None
            values.append(value)
            after = body[end:].lstrip()
            if after and not after.startswith((self._BEGIN, self._END)):
                return None
            rest = "".join(after.partition(self._BEGIN)[1:])
        return _parsed(content, values)

    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        begin, end = markers(tokenizer, self._BEGIN, self._END)
        more = r' ("\n" one)*' if several else ""
        body = f'start: one{more}\none: {begin} "\\n" call "\\n" {end}'
        return object_grammar(tools, _NAMES, body)


class ListFormat(ToolFormat):
    """A marker and a JSON list of calls: ``<|tool_call|>[...]`` of Granite 3, ``functools[...]`` of
    Phi 4 mini."""

    def __init__(self, begin: str) -> None:
        self._begin = begin

    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        content, found, body = text.partition(self._begin)
        try:
            values = json.loads(body) if found else None
        except ValueError:
            return None
        return _parsed(content, values) if isinstance(values, list) else None

    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        more = r' (", " call)*' if several else ""
        return object_grammar(
            tools, _NAMES, f'start: {marker(tokenizer, self._begin)} "[" call{more} "]"'
        )


class MistralFormat(ToolFormat):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or, since version 11 of Mistral's
    tokenizers, ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

    _BEGIN = "[TOOL_CALLS]"
    _CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?(?=\s*\{)")

    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        content, *bodies = text.split(self._BEGIN)
        values: list[Any] = []
        for body in bodies:
            found = self._values(body)
            if found is None:
                return None
            values += found
        return _parsed(content, values)

    def _values(self, body: str) -> list[Any] | None:
        named = self._CALL.match(body)
        try:
            if named is None:
                values = json.loads(body)
                return values if isinstance(values, list) else None
            return [{"name": named[1], "arguments": json.loads(body[named.end() :])}]
        except ValueError:
            return None

    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        begin = marker(tokenizer, self._BEGIN)
        if tokenizer.added_token_id("[ARGS]") is None:
            more = r' (", " call)*' if several else ""
            return object_grammar(tools, _NAMES, f'start: {begin} "[" call{more} "]"')
        arguments = marker(tokenizer, "[ARGS]")
        return named_grammar(
            tools,
            f"start: one{'+' if several else ''}\none: {begin} call",
            lambda name, rule: f"{quoted(name)} {arguments} {rule}",
        )


class LlamaJsonFormat(ToolFormat):
    """``{"name": ..., "parameters": {...}}``, separated by ``;``, after an optional
    ``<|python_tag|>``: Llama 3.1 to 3.3, and Llama 4, which has other markers."""

    _BEGIN = re.compile(r"<\|python_(?:tag|start)\|>")

    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        content, *bodies = self._BEGIN.split(text, maxsplit=1)
        if not bodies:
            content, bodies = "", [text]
        body, values = bodies[0].replace("<|python_end|>", "").strip(), list[Any]()
        while body:
            try:
                value, end = _DECODER.raw_decode(body)
            except ValueError:
                return None
            values.append(value)
            body = body[end:].lstrip().removeprefix(";").lstrip()
        return _parsed(content, values)

    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        more = r' ("; " call)*' if several else ""
        return object_grammar(tools, _LLAMA_NAMES, f"start: call{more}")


class DeepSeekFormat(ToolFormat):
    """Names and arguments between markers. V3 and R1, unlike V3.1, write ``function`` before the
    separator and put the arguments in a fenced block after the name.

    Args:
        fenced: True to write calls as V3 does; both forms are read.
    """

    _BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
    _ONE, _SEPARATOR, _ONE_END = (
        "<｜tool▁call▁begin｜>",  # noqa: RUF001
        "<｜tool▁sep｜>",  # noqa: RUF001
        "<｜tool▁call▁end｜>",  # noqa: RUF001
    )
    _FENCED = re.compile(r"(.*?)\n```json\n(.*)\n```\s*", re.DOTALL)

    def __init__(self, *, fenced: bool) -> None:
        self._is_fenced = fenced

    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        values = []
        for head, body in fields_between(text, self._ONE, self._SEPARATOR, self._ONE_END):
            fenced = self._FENCED.fullmatch(body)
            name, arguments = (head, body) if fenced is None else (fenced[1], fenced[2])
            values.append({"name": name.strip(), "arguments": arguments})
        return _parsed(text.partition(self._BEGIN)[0], values)

    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        begin, end, one, separator, one_end = markers(
            tokenizer, self._BEGIN, self._END, self._ONE, self._SEPARATOR, self._ONE_END
        )
        between = r'"\n" ' if self._is_fenced else ""
        more = f" ({between}call)*" if several else ""

        def call(name: str, rule: str) -> str:
            if not self._is_fenced:
                return f"{one} {quoted(name)} {separator} {rule} {one_end}"
            head = quoted(f"{name}\n```json\n")
            return f'{one} "function" {separator} {head} {rule} "\\n```" {one_end}'

        return named_grammar(tools, f"start: {begin} call{more} {end}", call)


class KimiFormat(ToolFormat):
    """``functions.name:0`` and arguments between markers: Kimi K2."""

    _BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    _MARKERS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    _ID = re.compile(r"\s*(?:functions\.)?(.+?)(?::\d+)?\s*", re.DOTALL)

    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        values = []
        for written, arguments in fields_between(text, *self._MARKERS):
            id_ = self._ID.fullmatch(written)
            values.append({"name": id_ and id_[1], "arguments": arguments})
        return _parsed(text.partition(self._BEGIN)[0], values)

    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        begin, arguments, end = markers(tokenizer, *self._MARKERS)
        sides = markers(tokenizer, self._BEGIN, self._END)
        number = "/[0-9]{1,2}/" if several else '"0"'
        return named_grammar(
            tools,
            f"start: {sides[0]} call{'+' if several else ''} {sides[1]}\nnumber: {number}",
            lambda name, rule: (
                f"{begin} {quoted(f'functions.{name}:')} number {arguments} {rule} {end}"
            ),
        )
