"""Formats in which tags surround a call and its arguments, as vLLM's parsers read them
(vllm/tool_parsers: qwen3coder, seed_oss, minimax_m2, glm4_moe)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchinfer.text.tools.call_grammar import (
    Parameter,
    markers,
    parameter_grammar,
    quoted,
    text_until,
)
from batchinfer.text.tools.tool_format import (
    ParsedCalls,
    ToolCall,
    ToolFormat,
    Tools,
    fields_between,
    parameters_of,
    typed_value,
)

if TYPE_CHECKING:
    from batchinfer.text.tokenizer import Tokenizer


class TagFormat(ToolFormat):
    """Calls and their parameters in tags, such as ``<tool_call><function=name><parameter=key>value
    </parameter></function></tool_call>`` of Qwen3-Coder and Nemotron 3.

    Args:
        outer: the tag around a call, or around all calls.
        call, parameter: the beginning of the opening tag of a call or a parameter, up to the name.
        after_name: the rest of these opening tags, after the name.
        is_around_all: True if one ``outer`` tag surrounds all calls.
    """

    def __init__(
        self, outer: str, call: str, parameter: str, after_name: str, *, is_around_all: bool
    ) -> None:
        self._outer, self._outer_end = f"<{outer}>", f"</{outer}>"
        self._call, self._parameter, self._after = call, parameter, after_name
        self._call_end, self._parameter_end = (
            f"</{re.split('[= ]', begin[1:])[0]}>" for begin in (call, parameter)
        )
        self._is_around_all = is_around_all
        name = rf"([^<>]+?){re.escape(after_name)}"
        ends = rf"{self._call_end}|{re.escape(self._outer_end)}|$"
        self._calls = re.compile(rf"{re.escape(call)}{name}(.*?)(?P<end>{ends})", re.DOTALL)
        begin = re.escape(parameter)
        ends = rf"{self._parameter_end}|(?={begin})|$"
        self._parameters = re.compile(rf"{begin}{name}(.*?)(?P<end>{ends})", re.DOTALL)

    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        calls = []
        for found in self._calls.finditer(text):
            call = self._read(found[1], found[2], found[3], tools)
            if call is None:
                return None
            calls.append(call)
        begin = self._outer if self._outer in text else self._call
        return ParsedCalls(text.partition(begin)[0].strip(), tuple(calls)) if calls else None

    def _read(self, written: str, body: str, end: str, tools: Tools) -> ToolCall | None:
        """Return a call; None if it is cut off. Only the last end marker may be missing."""
        name = written.strip()
        if not end and not body.rstrip().endswith(self._parameter_end):
            return None
        schema = parameters_of(tools, name)
        values = {
            key.strip(): typed_value(_without_breaks(value), schema, key.strip())
            for key, value, _ in self._parameters.findall(body)
        }
        return ToolCall(name, json.dumps(values, ensure_ascii=False))

    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        begin, end = markers(tokenizer, self._outer, self._outer_end)
        if self._is_around_all:
            body = f'start: {begin} "\\n" call{"+" if several else ""} {end}'
        else:
            more = ' ("\\n" one)*' if several else ""
            body = f'start: one{more}\none: {begin} "\\n" call {end}'
        body += "\n" + text_until(tokenizer, "text_value", self._parameter_end, "\n")
        call_end, parameter_end = markers(tokenizer, self._call_end, self._parameter_end)

        def argument(one: Parameter) -> str:
            head = quoted(f"{self._parameter}{one.name}{self._after}\n")
            written = "text_value" if one.is_text else f'{_choices(one)} "\\n" {parameter_end}'
            return f'({head} {written} "\\n"){"" if one.is_required else "?"}'

        def call(name: str, parameters: Sequence[Parameter]) -> str:
            head = quoted(f"{self._call}{name}{self._after}\n")
            return " ".join([head, *map(argument, parameters), call_end, '"\\n"'])

        return parameter_grammar(tools, body, call)


def _choices(parameter: Parameter) -> str:
    """Return the rule of a value that is JSON, or one of several strings."""
    if parameter.texts is None:
        return parameter.rule
    return f"({' | '.join(map(quoted, parameter.texts))})"


def _without_breaks(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


class GlmFormat(ToolFormat):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM 4.5
    and later."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"
    _KEY, _KEY_END = "<arg_key>", "</arg_key>"
    _VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
    _CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
    _ARGUMENT = (_KEY, _KEY_END, _VALUE, _VALUE_END)

    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        calls = []
        for body, end in self._CALL.findall(text):
            name = body.partition(self._KEY)[0].strip()
            is_whole = end or body.rstrip().endswith(self._VALUE_END)
            if not name or not is_whole:
                return None
            schema = parameters_of(tools, name)
            values = {
                key.strip(): typed_value(value, schema, key.strip())
                for key, _, value in fields_between(body, *self._ARGUMENT)
            }
            calls.append(ToolCall(name, json.dumps(values, ensure_ascii=False)))
        content = text.partition(self._BEGIN)[0].strip()
        return ParsedCalls(content, tuple(calls)) if calls else None

    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        sides = markers(tokenizer, self._BEGIN, self._END)
        key, key_end, value, value_end = markers(tokenizer, *self._ARGUMENT)

        def argument(one: Parameter) -> str:
            written = "text_value" if one.is_text else f"{_choices(one)} {value_end}"
            rule = f'{key} {quoted(one.name)} {key_end} "\\n" {value} {written} "\\n"'
            return rule if one.is_required else f"({rule})?"

        def call(name: str, parameters: Sequence[Parameter]) -> str:
            return " ".join([sides[0], quoted(f"{name}\n"), *map(argument, parameters), sides[1]])

        more = ' ("\\n" call)*' if several else ""
        until = text_until(tokenizer, "text_value", self._VALUE_END)
        return parameter_grammar(tools, f"start: call{more}\n{until}", call)
