"""A hundred grammars that are wrong, unsupported, empty or enormous."""

from __future__ import annotations

import json
from typing import Any


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _doubling(letter: str, count: int) -> str:
    rules = (f"{letter}{at}: {letter}{at + 1} {letter}{at + 1}" for at in range(count))
    return "\n".join([f"start: {letter}0", *rules, f'{letter}{count}: "x"'])


_SCHEMAS: dict[str, Any] = {
    "a type misspelled": {"type": "strnig"},
    "a type that is a number": {"type": 3},
    "types of nothing": {"type": []},
    "nothing fits": False,
    "an enum of nothing": {"enum": []},
    "an enum that is a text": {"enum": "abc"},
    "properties that are a list": {"type": "object", "properties": ["a"]},
    "required that is a text": {"type": "object", "required": "a"},
    "required twice over and absent": {
        "type": "object",
        "required": ["a"],
        "additionalProperties": False,
    },
    "items that are a text": {"type": "array", "items": "integer"},
    "a bound that is a text": {"type": "integer", "minimum": "3"},
    "bounds the wrong way round": {"type": "integer", "minimum": 5, "maximum": 2},
    "lengths the wrong way round": {"type": "string", "minLength": 5, "maxLength": 2},
    "counts the wrong way round": {"type": "array", "minItems": 5, "maxItems": 2},
    "a negative length": {"type": "string", "minLength": -1},
    "half a length": {"type": "string", "maxLength": 1.5},
    "a length that is a text": {"type": "string", "maxLength": "9"},
    "a pattern that is wrong": {"type": "string", "pattern": "(a"},
    "a pattern that looks ahead": {"type": "string", "pattern": "^(?=a).*$"},
    "a pattern that looks behind": {"type": "string", "pattern": "(?<=a)b"},
    "a pattern that refers back": {"type": "string", "pattern": r"^(a)\1$"},
    "a pattern that explodes": {"type": "string", "pattern": "^(a{1000}){1000}$"},
    "a pattern that is a number": {"type": "string", "pattern": 3},
    "a pattern and a length that exclude each other": {
        "type": "string",
        "pattern": "^a{10}$",
        "maxLength": 3,
    },
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "unique items": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "property names": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependent schemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluated": {"type": "object", "unevaluatedProperties": False},
    "one of several that overlap": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "all of what excludes each other": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "any of nothing": {"anyOf": []},
    "a format that is a number": {"type": "string", "format": 3},
    "a multiple of nothing": {"type": "integer", "multipleOf": 0},
    "a multiple of next to nothing": {"type": "number", "multipleOf": 1e-300},
    "a range of astronomers": {"type": "number", "minimum": 1e-300, "maximum": 1e300},
    "a range beyond 64 bits": {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
    "a reference to nothing": {"$ref": "#/$defs/nothing"},
    "a reference to itself": {"$ref": "#"},
    "references in a circle": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "a reference to the network": {"$ref": "http://example.com/schema.json"},
    "a reference to a file": {"$ref": "file:///etc/passwd"},
    "a reference that is a number": {"$ref": 3},
    "a schema in a schema that is wrong": {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "intger"}}},
        "required": ["a"],
    },
    "nested 100 deep": _nested(100),
    "nested 300 deep": _nested(300),
    "20,000 properties": {
        "type": "object",
        "properties": {f"p{at}": {"type": "string"} for at in range(20_000)},
    },
    "a product of alternatives": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(9)]}
            for i in range(9)
        ]
    },
}
_TEXTS = {
    "half a schema": '{"type": ',
    "two schemas": '{"type": "string"} {"type": "string"}',
    "a schema that is a text": '"string"',
    "a schema that is a list": '[{"type": "string"}]',
    "a schema that is null": "null",
    "a schema that is a number": "3",
    "a schema with NaN": '{"const": NaN}',
    "a schema that is nothing": "",
    "a schema in XML": "<schema/>",
    "60,000 brackets": '{"type":"array","items":' * 60_000,
    "a schema of 2 MB": json.dumps({"enum": ["a" * 2**21]}),
}
_REGEXES = {
    "an open bracket": "(a",
    "a closing bracket": "a)",
    "an open class": "[a",
    "a star of nothing": "*a",
    "a range the wrong way round": "[z-a]",
    "a repeat the wrong way round": "a{5,2}",
    "a reference back": r"(a)\1",
    "a named reference back": r"(?P<x>a)(?P=x)",
    "a look ahead": "(?=a)b",
    "a negative look ahead": "(?!a)b",
    "a look behind": "(?<=a)b",
    "an atomic group": "(?>a)b",
    "a condition": "(a)?(?(1)b|c)",
    "an unknown escape": r"\y",
    "an unknown property": r"\p{Klingon}",
    "a flag nobody knows": "(?k)a",
    "nothing at all": r"[^\s\S]",
    "1,000 open groups": "(?P<a>" * 1000,
    "1,000 brackets": "(" * 1000 + "a" + ")" * 1000,
    "100,000 brackets": "(" * 100_000 + ")" * 100_000,
    "a thousand million": "((a{1000}){1000}){1000}",
    "a repeat beyond 32 bits": "a{9999999999}",
    "a megabyte": "a" * 2**20,
    "two megabytes": "a" * 2**21,
}
_LARKS = {
    "no start": 'begin: "a"',
    "an unknown rule": "start: foo",
    "an unknown terminal": "start: FOO",
    "no end of a text": 'start: "a',
    "no end of a group": 'start: ("a"',
    "no arrow": "start",
    "a rule twice": 'start: "a"\nstart: "b"',
    "a rule of itself": "start: start",
    "a rule that never ends": 'start: start "a"',
    "a terminal of itself": 'start: A\nA: A "b" | "c"',
    "an import of nothing": "%import python.STRING\nstart: STRING",
    "an import of a file": "%import /etc/passwd\nstart: passwd",
    "an expression that is wrong": "start: /(/",
    "an expression that looks ahead": "start: /(?=a)b/",
    "a schema that is wrong in it": 'start: %json {"type": "strnig"}',
    "doubling rules": _doubling("a", 40),
    "doubling terminals": _doubling("A", 40),
    "a million repeats": 'start: ("a"{1000}){1000}',
    "10,000 brackets in Lark": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000,
    "prose": "Please answer in JSON.",
}
_OTHERS: dict[str, dict[str, Any]] = {
    "no choices": {"choice": []},
    "a choice of numbers": {"choice": [1, 2]},
    "a choice that is empty": {"choice": [""]},
    "choices that are a text": {"choice": "yes"},
    "half a surrogate pair": {"regex": "\ud800"},
    "an unknown kind": {"xml": "<a/>"},
    "two kinds": {"regex": "a", "choice": ["a"]},
    "no kind": {},
    "whitespace that is wrong": {"json": {"type": "array"}, "whitespace_pattern": "("},
}

BAD: dict[str, dict[str, Any]] = {
    **{name: {"json": schema} for name, schema in _SCHEMAS.items()},
    **{name: {"json": text} for name, text in _TEXTS.items()},
    **{name: {"regex": text} for name, text in _REGEXES.items()},
    **{name: {"grammar": text} for name, text in _LARKS.items()},
    **_OTHERS,
}
assert len(BAD) >= 100
