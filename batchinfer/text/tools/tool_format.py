"""Calls of tools, and what every way of writing them offers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from batchinfer.text.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
"""OpenAI's definitions: ``{"type": "function", "function": {"name", "parameters", ...}}``."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one tool."""

    name: str
    arguments: str
    """A JSON object."""

    def as_openai(self, place: int) -> dict[str, Any]:
        """OpenAI's form of the call.

        Args:
            place: among the calls of all samples of a row; equal calls there differ by their ids.
        """
        text = f"{place} {self.name} {self.arguments}"
        function = {"name": self.name, "arguments": self.arguments}
        digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return {"id": f"call_{digest[:24]}", "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """A text taken apart."""

    content: str
    """What is said beside the calls."""
    calls: tuple[ToolCall, ...]


class ToolFormat(Protocol):
    """A way in which models write calls."""

    spans_thinking: bool
    """Whether its grammar is of the whole sample, and has a place for the thinking."""

    def parse(self, text: str, tools: Tools) -> ParsedCalls | None:
        """The calls in a text, special tokens included; None where there is none, or one that is
        not well formed.

        Args:
            tools: their parameters' types say what values mean that are written as plain text.
        """
        ...

    def grammar(self, tools: Tools, tokenizer: Tokenizer, *, several: bool) -> str | None:
        """A grammar (Lark) of calls of these tools; None where none can insist on the format.

        Args:
            several: whether one call may follow another.
        """
        ...


def calls_in(text: str, tool_format: ToolFormat, tools: Tools) -> ParsedCalls | None:
    """What ``tool_format`` reads in a text; None also where a call is not to be stored or sent on:
    nested too deeply, with numbers JSON does not have, or with halves of surrogate pairs."""
    try:
        found = tool_format.parse(text, tools)
        for call in () if found is None else found.calls:
            f"{call.name}{call.arguments}".encode()
            json.loads(call.arguments, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return found


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def json_arguments(value: object) -> str | None:
    """Arguments as JSON text: of an object, or of the text of one; None for what is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if value is None:
        value = {}
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The schema of a tool's parameters; empty where there is none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            found = function.get("parameters")
            return found if isinstance(found, Mapping) else {}
    return {}


def fields_between(text: str, *markers: str) -> Iterator[list[str]]:
    """What stands between markers that come in order, again and again, up to where one is missing.

    In time that grows with the text, whatever is in it: models that loop repeat markers by the
    thousand.
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
    """The value of a parameter that is written as plain text: a text where its type says so, else
    JSON where it is some."""
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    kind = own.get("type") if isinstance(own, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        word = text.strip().lower()
        if kind == "boolean" and word in ("true", "false"):
            return word == "true"
        return None if word in ("null", "none") and kind is not None else text
