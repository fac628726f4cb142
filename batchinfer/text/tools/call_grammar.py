"""Grammars (Lark, as llguidance reads it) of calls that a sample must make.

Every format has rules of its own around a tool's name; its arguments are a JSON object by the
tool's schema, or its parameters one by one, in the schema's order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.text.structured.json_schema import exact_schema, widened_schema
from batchinfer.text.tools.tool_format import Tools

if TYPE_CHECKING:
    from batchinfer.text.tokenizer import Tokenizer

ANY_TEXT = "ANY_TEXT: /(?s:.*)/"
"""A terminal: text of any length, without special tokens."""
_DEFINITIONS = ("$defs", "definitions")
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As json.dumps has it, and so the conversations that models are trained on."""
_OF_PLAIN_OBJECTS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "title", "description"),
        *("$schema", *_DEFINITIONS),
    }
)
"""Keywords of a schema whose parameters can be written one by one."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tool's parameter and the rule of its value."""

    name: str
    is_required: bool
    schema: Mapping[str, Any]
    """With the definitions that it may refer to."""
    rule: str
    """Name of a rule: the value as JSON."""

    @property
    def is_text(self) -> bool:
        """Whether its value is any text: its pattern and its length are no part of a grammar of
        plain text."""
        return self.schema.get("type") == "string" and not {"enum", "const"} & set(self.schema)

    @property
    def texts(self) -> list[str] | None:
        """The texts that its value may be; None where it is not one of some texts."""
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return values
        return None


def object_grammar(tools: Tools, names: Mapping[str, str], body: str) -> str:
    """A grammar in which the rule ``call`` is a JSON object of a tool's name and its arguments.

    Args:
        names: what the keys of name and arguments are called.
        body: the other rules.
    """
    rules = list[str]()
    for at, tool in enumerate(tools):
        parameters = _schema(tool)
        schema = {
            "type": "object",
            "properties": {
                names["name"]: {"const": tool["function"]["name"]},
                names["arguments"]: parameters,
            },
            "required": [names["name"], names["arguments"]],
            "additionalProperties": False,
            # References in parameters are from the root.
            **_definitions(parameters),
        }
        rules.append(f"call{at}: {_json(schema)}")
    return _grammar(len(tools), body, rules)


def named_grammar(tools: Tools, body: str, call: Callable[[str, str], str]) -> str:
    """A grammar in which the rule ``call`` is a tool's name, and its arguments as a JSON object.

    Args:
        body: the other rules.
        call: of a tool's name and the rule of its arguments, the rule of its call.
    """
    rules = list[str]()
    for at, tool in enumerate(tools):
        arguments = f"arguments{at}"
        rules.append(f"call{at}: {call(tool['function']['name'], arguments)}")
        rules.append(f"{arguments}: {_json(_schema(tool))}")
    return _grammar(len(tools), body, rules)


def parameter_grammar(
    tools: Tools, body: str, call: Callable[[str, list[Parameter]], str]
) -> str | None:
    """A grammar in which the rule ``call`` is a tool's name and its parameters; None where the
    schema of one does not list them.

    Args:
        body: the other rules.
        call: of a tool's name and its parameters, the rule of its call.
    """
    rules = list[str]()
    for at, tool in enumerate(tools):
        found = _parameters(tool, at)
        if found is None:
            return None
        rules.append(f"call{at}: {call(tool['function']['name'], found)}")
        rules += [f"{one.rule}: {_json(one.schema)}" for one in found]
    return _grammar(len(tools), body, rules)


def quoted(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def marker(tokenizer: Tokenizer, text: str) -> str:
    """A marker in a grammar: by its token, if it is one."""
    token_id = tokenizer.added_token_id(text)
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def text_until(tokenizer: Tokenizer, rule: str, end: str, before: str = "") -> str:
    """The rules of any text up to a marker, which is part of it.

    Args:
        rule: its name.
        before: what is written in front of the marker.
    """
    token_id = tokenizer.added_token_id(end)
    if token_id is not None:  # llguidance looks for no text in such tokens
        return f"{rule}: ANY_TEXT <[{token_id}]>\n{ANY_TEXT}"
    return f"{rule}[suffix={quoted(before + end)}]: /(?s:.*)/"


def _grammar(num_tools: int, body: str, rules: list[str]) -> str:
    choice = " | ".join(f"call{at}" for at in range(num_tools))
    return "\n".join([body, f"call: {choice}", *rules, ""])


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: those that it lists, unless it asks for others."""
    parameters = tool["function"].get("parameters", {})
    schema: dict[str, Any] = widened_schema(exact_schema(parameters))
    if set(schema) <= _OF_PLAIN_OBJECTS:
        return {"type": "object", "additionalProperties": False, **schema}
    return schema


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in _DEFINITIONS if key in schema}


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def _parameters(tool: Mapping[str, Any], at: int) -> list[Parameter] | None:
    schema = _schema(tool)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not set(schema) <= _OF_PLAIN_OBJECTS or not set(required) <= set(properties):
        return None
    shared = _definitions(schema)
    return [
        Parameter(
            name,
            name in required,
            {**(own if isinstance(own, Mapping) else {}), **shared},
            f"value{at}x{place}",
        )
        for place, (name, own) in enumerate(properties.items())
    ]
