"""Defines tool calls and the interface of their formats."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchinfer.text.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
"""OpenAI's definitions: ``{"type": "function", "function": {"name", "parameters", ...}}``."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text of an object."""

    def as_openai(self, place: int) -> dict[str, Any]:
        """Return the call in OpenAI's format.

        Args:
            place: index among the calls of all samples of a row, so that equal calls get different
                ids.
        """
        text = f"{place} {self.name} {self.arguments}"
        function = {"name": self.name, "arguments": self.arguments}
        digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return {"id": f"call_{digest[:24]}", "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """The content and the tool calls of a text."""

    content: str
    """Text without the calls."""
    calls: tuple[ToolCall, ...]


class ToolFormat(ABC):
    spans_thinking = False
    """True if the grammar covers the whole sample, including reasoning."""

    @abstractmethod
    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        """Return the calls in a text with special tokens; None if no call exists or a call is
        malformed.

        Args:
            tools: tools whose parameter types decide how to read values written as plain text.
        """

    @abstractmethod
    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        """Return a grammar (Lark) for calls to these tools; None if the format has none.

        Args:
            several: True if more than one call is allowed.
        """


def calls_in(text: str, tool_format: ToolFormat, tools: Tools) -> ParsedCalls | None:
    """Return the calls that ``tool_format`` finds in a text.

    Return None if a call is not valid JSON: for example, if it is nested too deeply, or contains
    NaN, Infinity or half of a surrogate pair.
    """
    try:
        parsed = tool_format.parse(text, tools)
        for call in () if parsed is None else parsed.calls:
            f"{call.name}{call.arguments}".encode()
            json.loads(call.arguments, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return parsed


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def json_arguments(value: object) -> str | None:
    """Return arguments as JSON text, from an object or its JSON text; None for other values."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if value is None:
        value = {}
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the schema of a tool's parameters, which may be empty."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            return schema if isinstance(schema, Mapping) else {}
    return {}


def fields_between(text: str, *markers: str) -> Iterator[list[str]]:
    """Yield the texts between the markers, for each complete series of markers in ``text``.

    The search takes linear time for any text: a model that loops repeats markers by the thousand.
    """
    at = text.find(markers[0])
    while at >= 0:
        fields = list[str]()
        for begin, end in pairwise(markers):
            start = at + len(begin)
            at = text.find(end, start)
            if at < 0:
                return
            fields.append(text[start:at])
        yield fields
        at = text.find(markers[0], at + len(markers[-1]))


def typed_value(text: str, schema: Mapping[str, Any], name: str) -> Any:
    """Return the value of a parameter that is written as plain text: the text itself if the type is
    string or the text is not JSON, otherwise the parsed JSON. If the declared type is boolean,
    Python's ``True`` and ``False`` are accepted too; if any type is declared, ``None`` is accepted
    as null."""
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, Mapping) else None
    kind = declared.get("type") if isinstance(declared, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        word = text.strip().lower()
        if kind == "boolean" and word in ("true", "false"):
            return word == "true"
        return None if word in ("null", "none") and kind is not None else text
