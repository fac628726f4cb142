"""A dozen schemas of the kind that users write."""

from __future__ import annotations

from typing import Any


def _record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_NAME = {"type": "string", "minLength": 1, "maxLength": 12}
_POINT = _record(x={"type": "integer"}, y={"type": "integer"})

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": _record(name=_NAME, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "enum": _record(sentiment={"enum": ["positive", "negative", "neutral", None, 0]}),
    "constants": _record(kind={"const": "invoice"}, version={"const": 2}, ok={"type": "boolean"}),
    "nested": _record(
        title=_NAME, author=_record(name=_NAME, address=_record(city=_NAME, zip=_NAME))
    ),
    "union": _record(value={"anyOf": [_POINT, {"type": "boolean"}, {"enum": ["none"]}]}),
    "types": _record(value={"type": ["integer", "null", "boolean"]}),
    "array": {
        "type": "array",
        "items": {"enum": ["red", "green", "blue"]},
        "minItems": 2,
        "maxItems": 4,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "records": _record(points={"type": "array", "items": _POINT, "minItems": 1, "maxItems": 2}),
    "pattern": _record(
        date={"type": "string", "pattern": r"^\d{4}-(0[1-9]|1[0-2])-\d{2}$"},
        mail={"type": "string", "pattern": r"^[a-z]{1,8}@[a-z]{1,8}\.com$"},
    ),
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2.5]}, "c": _NAME},
        "required": ["b"],
        "additionalProperties": False,
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "left"],
                "additionalProperties": False,
            }
        },
    },
}
