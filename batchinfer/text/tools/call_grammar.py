"""Makes grammars (in llguidance's Lark syntax) for the tool calls that a sample must make.

Every format has its own rules for the text around a tool's name. The arguments are a JSON object
that follows the tool's schema, or parameters in the order of the schema.
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
"""Terminal that matches any text without special tokens."""
_DEFINITIONS = ("$defs", "definitions")
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spacing of json.dumps, as in the conversations that models are trained on."""
_OF_PLAIN_OBJECTS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "title", "description"),
        *("$schema", *_DEFINITIONS),
    }
)
"""Keywords of schemas that only list parameters."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tool's parameter and the rule for its value."""

    name: str
    is_required: bool
    schema: Mapping[str, Any]
    """JSON schema of the value, with the definitions that it may refer to."""
    rule: str
    """Name of the rule for the value as JSON."""

    @property
    def is_text(self) -> bool:
        """True if the value may be any string; grammars of plain text ignore pattern and length."""
        return self.schema.get("type") == "string" and not {"enum", "const"} & set(self.schema)

    @property
    def texts(self) -> list[str] | None:
        """The possible values, if the schema lists strings; else None."""
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return values
        return None


def object_grammar(tools: Tools, names: Mapping[str, str], body: str) -> str:
    """Return a grammar whose rule ``call`` matches a JSON object of a tool's name and arguments.

    Args:
        names: the JSON keys of the name and the arguments.
        body: the other rules, which use ``call``.
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
            # References inside the parameters are relative to the root.
            **_definitions(parameters),
        }
        rules.append(f"call{at}: {_json(schema)}")
    return _grammar(len(tools), body, rules)


def named_grammar(tools: Tools, body: str, call: Callable[[str, str], str]) -> str:
    """Return a grammar whose rule ``call`` matches a tool's name and its JSON arguments.

    Args:
        body: the other rules, which use ``call``.
        call: returns the rule of a call, given the tool's name and the rule of its arguments.
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
    """Return a grammar whose rule ``call`` matches a tool's name and its parameters; None if a
    schema does not list its parameters.

    Args:
        body: the other rules, which use ``call``.
        call: returns the rule of a call, given the tool's name and its parameters.
    """
    rules = list[str]()
    for at, tool in enumerate(tools):
        parameters = schema_parameters(_schema(tool), f"value{at}x")
        if parameters is None:
            return None
        rules.append(f"call{at}: {call(tool['function']['name'], parameters)}")
        rules += [f"{one.rule}: {_json(one.schema)}" for one in parameters]
    return _grammar(len(tools), body, rules)


def quoted(text: str) -> str:
    """Return a text as a string literal of the grammar."""
    # Lark's strings cannot hold the character DEL, which JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")


def marker(tokenizer: Tokenizer, text: str) -> str:
    """Return a marker as a token of the grammar if it is an added token, else as a string."""
    token_id = tokenizer.added_token_id(text)
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def markers(tokenizer: Tokenizer, *texts: str) -> list[str]:
    return [marker(tokenizer, text) for text in texts]


def text_until(tokenizer: Tokenizer, rule: str, end: str, before: str = "") -> str:
    """Return a rule named ``rule`` for any text that ends with a marker.

    Args:
        before: text that precedes the marker.
    """
    token_id = tokenizer.added_token_id(end)
    if token_id is not None:  # a suffix cannot match an added token
        return f"{rule}: ANY_TEXT <[{token_id}]>\n{ANY_TEXT}"
    return f"{rule}[suffix={quoted(before + end)}]: /(?s:.*)/"


def _grammar(num_tools: int, body: str, rules: list[str]) -> str:
    choice = " | ".join(f"call{at}" for at in range(num_tools))
    return "\n".join([body, f"call: {choice}", *rules, ""])


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments. If the schema only lists parameters and does not set
    ``additionalProperties``, set it to False."""
    parameters = tool["function"].get("parameters", {})
    schema: dict[str, Any] = widened_schema(exact_schema(parameters))
    if set(schema) <= _OF_PLAIN_OBJECTS:
        return {"type": "object", "additionalProperties": False, **schema}
    return schema


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in _DEFINITIONS if key in schema}


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def schema_parameters(schema: Mapping[str, Any], prefix: str) -> list[Parameter] | None:
    """Return the parameters of a schema; None if the schema does not only list parameters.

    Args:
        prefix: beginning of the names of the parameters' rules.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not set(schema) <= _OF_PLAIN_OBJECTS or not set(required) <= set(properties):
        return None
    shared = _definitions(schema)
    return [
        Parameter(
            name,
            name in required,
            {**(own if isinstance(own, Mapping) else {}), **shared},
            f"{prefix}{place}",
        )
        for place, (name, own) in enumerate(properties.items())
    ]
