"""Over three hundred schemas that a grammar can enforce only in part, or not at all.

There are a few handwritten schemas per keyword, as in JSON Schema's test suite. The random schemas
describe records like those of APIs, with one or two keywords that are hard to enforce. Short texts
match most of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

_BOOL: Schema = {"type": "boolean"}
_DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
_COLOR: Schema = {"enum": ["red", "green", "blue"]}
_SHORT: Schema = {"type": "string", "pattern": "^[a-c]{1,3}$"}
_DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def _list(items: Any = _DIGIT, **others: Any) -> Schema:
    return {"type": "array", "items": items, "maxItems": 4, **others}


def _record(required: Sequence[str] = (), *, others: Any = False, **properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": others,
    }


def _text(pattern: str, **others: Any) -> Schema:
    return {"type": "string", "pattern": pattern, "maxLength": 8, **others}


_BY_KEYWORD: Mapping[str, Sequence[Schema]] = {
    "not": [
        {**_DIGIT, "not": {"enum": [3, 5]}},
        {"enum": ["a", 1, None, True], "not": {"type": ["string", "null"]}},
        {**_BOOL, "not": {"not": {"const": True}}},
        {**_COLOR, "not": {"pattern": "^r"}},
        {**_record(a=_BOOL, b=_BOOL), "not": {"required": ["a", "b"]}},
        _record(["b"], a={"not": {}}, b=_BOOL),
        {**_list(), "not": {"maxItems": 1}},
        {**_DIGIT, "not": {"anyOf": [{"const": 1}, {"minimum": 5}]}},
        {**_DIGIT, "not": {"oneOf": [{"minimum": 3}, {"maximum": 6}]}},
        {**_DIGIT, "not": False},
        {**_SHORT, "not": {"format": "flavor"}, "maxLength": 2},
        {"not": {"$ref": "#/$defs/odd"}, **_DIGIT, "$defs": {"odd": {"enum": [1, 3, 5, 7, 9]}}},
        {**_list(), "items": {**_DIGIT, "not": {"const": 0}}, "minItems": 1},
    ],
    "if": [
        {**_DIGIT, "if": {"minimum": 5}, "then": {"multipleOf": 2}, "else": {"maximum": 2}},
        {"enum": [1, 2, "a", "b"], "if": {"type": "string"}, "then": {"const": "a"}},
        {**_BOOL, "if": {"const": True}},
        {**_BOOL, "then": {"const": 3}},
        {**_BOOL, "else": False, "then": False},
        {**_BOOL, "if": True, "then": {"const": True}},
        {**_BOOL, "if": False, "then": False, "else": {"const": False}},
        {
            **_record(["kind"], kind={"enum": ["new", "old"]}, age=_DIGIT),
            "if": {"properties": {"kind": {"const": "old"}}},
            "then": {"required": ["age"]},
            "else": {"not": {"required": ["age"]}},
        },
        {
            **_record(["land", "code"], land={"enum": ["A", "B"]}, code=_text("^[0-9]{1,2}$")),
            "allOf": [
                {
                    "if": {"properties": {"land": {"const": land}}},
                    "then": {"properties": {"code": {"pattern": pattern}}},
                }
                for land, pattern in (("A", "^.$"), ("B", "^..$"))
            ],
        },
        {**_list({"enum": [0, 1]}), "if": {"minItems": 2}, "then": {"items": {"const": 1}}},
        {"anyOf": [{"if": {"const": 1}, "then": False, **_DIGIT}, {"type": "null"}]},
    ],
    "oneOf": [
        {"oneOf": [{**_DIGIT}, {"enum": [3, "x"]}]},
        {"oneOf": [{"type": "integer", "minimum": 1, "maximum": 5}, {"enum": [4, 5, 6]}]},
        {**_DIGIT, "oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]},
        {**_BOOL, "oneOf": [True, False]},
        {**_BOOL, "oneOf": [{"const": True}, {}, False]},
        {**_record(a=_BOOL, b=_BOOL), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"oneOf": [_record(["a"], others=_DIGIT, a=_BOOL), _record(["b"], others=_BOOL, b=_DIGIT)]},
        {"oneOf": [_SHORT, _text("^a"), _text("^ab$")]},
        {"oneOf": [_list(), _list(minItems=1)]},
        {**_DIGIT, "oneOf": [{"oneOf": [{"minimum": 2}, {"minimum": 5}]}, {"const": 0}]},
        {**_DIGIT, "anyOf": [{"minimum": 3}, {"const": 1}], "oneOf": [{"const": 1}, {}]},
        {
            **_DIGIT,
            "oneOf": [{"$ref": "#/$defs/few"}, {"$ref": "#/$defs/even"}],
            "$defs": {"few": {"maximum": 3}, "even": {"multipleOf": 2}},
        },
    ],
    "uniqueItems": [
        _list(uniqueItems=True),
        _list(_BOOL, uniqueItems=True),
        _list(_COLOR, uniqueItems=True, minItems=2),
        _list(_list(_BOOL, maxItems=1), uniqueItems=True),
        _list(_record(["a"], a=_BOOL), uniqueItems=True, minItems=1, maxItems=2),
        _list({"enum": [1, True, 0, False, "1"]}, uniqueItems=True, minItems=2),
        {"type": "array", "prefixItems": [_BOOL, _BOOL], "items": False, "uniqueItems": True},
        _record(["tags"], tags=_list(_COLOR, uniqueItems=True, minItems=1)),
    ],
    "contains": [
        _list(contains={"const": 7}),
        _list(contains={"minimum": 5}, minContains=2),
        _list(contains={"minimum": 5}, maxContains=1, minItems=1),
        _list(contains={"minimum": 5}, minContains=0),
        _list(contains={"minimum": 3}, minContains=1.0, maxContains=2.0),
        _list(contains=True),
        _list(contains=False, minContains=0),
        _list(_BOOL, minContains=3),
        _list(_BOOL, maxContains=0),
        _list(_record(["a"], a=_BOOL), contains={"properties": {"a": {"const": True}}}),
        _list({"enum": [1, "a"]}, allOf=[{"contains": {"const": 1}}, {"contains": {"const": "a"}}]),
    ],
    "dependencies": [
        {**_record(a=_BOOL, b=_BOOL), "dependentRequired": {"a": ["b"]}},
        {**_record(a=_BOOL, b=_BOOL), "dependentRequired": {"a": ["b"], "b": ["a"]}},
        {**_record(a=_BOOL), "dependentRequired": {}},
        {
            **_record(["b"], a=_BOOL, b=_DIGIT),
            "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}}},
        },
        {**_record(["b"], a=_BOOL, b=_DIGIT), "dependentSchemas": {"a": False}},
        {**_record(["b"], a=_BOOL, b=_DIGIT), "dependentSchemas": {"b": {"minProperties": 2}}},
        {**_record(a=_BOOL, b=_BOOL), "$schema": _DRAFT_7, "dependencies": {"a": ["b"]}},
        {
            **_record(["b"], a=_BOOL, b=_DIGIT),
            "$schema": _DRAFT_7,
            "dependencies": {"a": {"properties": {"b": {"const": 1}}}},
        },
    ],
    "names of properties": [
        {"type": "object", "additionalProperties": _BOOL, "propertyNames": _SHORT},
        {"type": "object", "additionalProperties": _BOOL, "propertyNames": {"maxLength": 3}},
        {**_record(a=_BOOL, b=_BOOL), "propertyNames": {"const": "a"}},
        {**_record(a=_BOOL), "propertyNames": False},
        {
            "type": "object",
            "patternProperties": {"^a": _DIGIT, "^ab?$": {"minimum": 3}},
            "additionalProperties": False,
            "minProperties": 1,
        },
        {
            "type": "object",
            "patternProperties": {"^[a-c]$": _BOOL, "[b-d]$": {"const": True}},
            "additionalProperties": False,
            "maxProperties": 2,
        },
        {
            "type": "object",
            "patternProperties": {"^(?!x)[a-c]$": _BOOL},
            "additionalProperties": False,
            "maxProperties": 2,
        },
        {
            "type": "object",
            "properties": {"ab": _DIGIT},
            "patternProperties": {"^a": {"minimum": 5}},
            "required": ["ab"],
            "additionalProperties": False,
        },
        _record(["not"], **{"not": _BOOL, "if": _DIGIT, "then": _BOOL}),
        _record(["format", "pattern"], format={"const": "x"}, pattern={"enum": [1, 2]}),
        _record(
            ["$ref"], **{"$ref": _BOOL, "enum": _DIGIT, "const": {**_DIGIT, "not": {"const": 1}}}
        ),
        _record(["default"], default=_text(r"^\d\s?\d$"), examples={"not": {}}),
        _record(["uniqueItems"], uniqueItems=_list(_BOOL, uniqueItems=True)),
        _record(["minItems"], minItems={"const": 1.0}, properties=_BOOL),
    ],
    "how many properties": [
        {**_record(a=_BOOL, b=_BOOL), "minProperties": 1},
        {**_record(a=_BOOL, b=_BOOL, c=_BOOL), "maxProperties": 1},
        {**_record(a=_BOOL, b=_BOOL, c=_BOOL), "minProperties": 2, "maxProperties": 2.0},
        {**_record(["a"], a=_BOOL, b=_BOOL), "minProperties": 2.0},
    ],
    "unevaluated": [
        {"type": "object", "properties": {"a": _BOOL}, "unevaluatedProperties": False},
        {"type": "object", "properties": {"a": _BOOL}, "unevaluatedProperties": _DIGIT},
        {
            "type": "object",
            "allOf": [{"properties": {"a": _BOOL}}, {"properties": {"b": _BOOL}}],
            "required": ["b"],
            "unevaluatedProperties": False,
        },
        {
            "type": "object",
            "properties": {"a": _BOOL},
            "required": ["a"],
            "if": {"properties": {"a": {"const": True}}},
            "then": {"properties": {"b": _DIGIT}},
            "unevaluatedProperties": False,
        },
        {"type": "array", "prefixItems": [_BOOL], "unevaluatedItems": False},
        {"type": "array", "prefixItems": [_BOOL], "maxItems": 2, "unevaluatedItems": {"const": 1}},
        {"type": "array", "contains": {"const": 1}, "unevaluatedItems": _BOOL, "maxItems": 3},
        _record(
            ["a"], a={"type": "array", "maxItems": 1, "unevaluatedItems": True, "items": _BOOL}
        ),
    ],
    "patterns": [
        _text("^(?=a)[a-c]+$"),
        _text("^(?!b)[a-c]+$"),
        _text("(?<=a)b"),
        _text(r"^(a|b)\1$"),
        _text(r"\bab\b"),
        _text(r"^\cJ?a$"),
        _text(r"^\d{2}$"),
        _text(r"^\w\W\w$"),
        _text(r"^\s\S$"),
        _text("^\\u00e9$"),
        _text("^é$"),
        _text(r"^\p{Lu}$"),
        {**_record(["a"], a=_text("^(?=.b)[a-c]+$")), "minProperties": 1},
        {"enum": ["ab", "ba"], "pattern": "(?<!a)b"},
        {"type": "array", "items": _text("^(?!a)[ab]$"), "minItems": 1, "maxItems": 2},
    ],
    "numbers": [
        {"type": "number", "minimum": 1e-300, "maximum": 1},
        {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
        {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        {"type": "integer", "exclusiveMinimum": 0.5, "exclusiveMaximum": 3.5},
        {"type": "integer", "minimum": 1.0, "maximum": 3.0},
        {"const": 0},
        {"const": 0.0},
        {"const": -2.0},
        {"enum": [1.0, 2, 3.5]},
        {"const": [0, {"a": 1.0}]},
        {"const": 9007199254740992},
        {"const": 12345678910111213},
        {"allOf": [{"multipleOf": 2}, {"multipleOf": 3}, _DIGIT]},
        {"type": "array", "items": _BOOL, "minItems": 1.0, "maxItems": 2.0},
        {"type": "string", "minLength": 1.0, "maxLength": 2.0},
        {
            "type": "array",
            "prefixItems": [_BOOL],
            "items": _DIGIT,
            "maxItems": 3.0,
            "minItems": 0.0,
        },
    ],
    "formats": [
        *({"type": "string", "format": name} for name in ("date", "time", "date-time")),
        *({"type": "string", "format": name} for name in ("ipv4", "ipv6", "uuid", "duration")),
        {"type": "string", "format": "hostname", "maxLength": 12},
        {"type": "string", "format": "email", "maxLength": 12},
        {"type": "string", "format": "uri", "maxLength": 24},
        *({**_SHORT, "format": name} for name in ("regex", "uri-reference", "iri-reference")),
        *({**_SHORT, "format": name} for name in ("flavor", "unknown", "hostname", "uri-template")),
        {**_text("^(/[a-c]?){1,3}$"), "format": "json-pointer"},
        {**_text("^[0-2](/a)?$"), "format": "relative-json-pointer"},
        {**_DIGIT, "format": "int32"},
        {"format": "date", **_DIGIT},
        {"type": "string", "format": "date", "pattern": "^20[0-9]{2}-02-29$"},
        {"type": "string", "format": "date", "not": {"pattern": "^[0-4]"}},
        {"type": "string", "format": "time", "pattern": "^23:59:60", "maxLength": 9},
        {"enum": ["2023-02-29", "2024-02-29"], "format": "date"},
        {"enum": ["-a", "a-", "a"], "format": "hostname"},
        _record(["from"], **{"from": {"type": "string", "format": "date"}, "to": {"format": "x"}}),
    ],
    "references": [
        {"$ref": "#/$defs/a", "$defs": {"a": {**_DIGIT, "not": {"const": 1}}}},
        {"$ref": "#/not", "not": {"type": "string"}},
        {"allOf": [{"$ref": "#/if"}, _DIGIT], "if": {"minimum": 3}},
        _record(
            ["a", "b"],
            a={**_list(), "contains": {"const": 1}},
            b={"$ref": "#/properties/a/contains"},
        ),
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": _BOOL},
            "not": {"const": True},
        },
        {"$ref": "#few", "$defs": {"a": {"$anchor": "few", "enum": [1, 2], "not": {"const": 1}}}},
        {
            "$id": "http://example.com/root.json",
            "$ref": "item.json",
            "$defs": {"a": {"$id": "item.json", **_BOOL, "if": {"const": True}, "then": False}},
        },
        {
            **_record(["left"], left={"anyOf": [{"type": "null"}, {"$ref": "#"}]}),
            "not": {"required": ["right"]},
        },
        {
            "$id": "http://example.com/tree",
            "$dynamicAnchor": "node",
            **_record(["v"], v=_BOOL, c=_list({"$dynamicRef": "#node"}, maxItems=1)),
        },
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {**_BOOL, "not": {"const": True}}}},
        {"$ref": "#/$defs/a%25b", "$defs": {"a%b": {**_BOOL, "not": {"const": True}}}},
        {"$ref": "#/x-shared/a", "x-shared": {"a": {**_BOOL, "not": {"const": True}}}},
        {
            "$schema": _DRAFT_7,
            "$ref": "#/definitions/a",
            "definitions": {"a": {**_BOOL, "else": {}}},
        },
        {
            "$schema": _DRAFT_7,
            "$ref": "#/definitions/a",
            "type": "string",
            "definitions": {"a": {**_BOOL, "if": {"const": True}, "then": False}},
        },
    ],
    "tuples and booleans": [
        {"$schema": _DRAFT_7, "type": "array", "items": [_BOOL, _DIGIT], "additionalItems": False},
        {
            "$schema": _DRAFT_7,
            "type": "array",
            "items": [_BOOL],
            "additionalItems": {**_DIGIT, "not": {"const": 0}},
            "maxItems": 3,
        },
        {"type": "array", "prefixItems": [True, _BOOL], "items": False, "uniqueItems": True},
        _record(["a"], a=_BOOL, b=True, c=False),
        {"type": "array", "items": False, "uniqueItems": True},
        {"anyOf": [False, {**_BOOL, "not": {"const": True}}]},
        {"allOf": [True, {**_BOOL, "not": {"const": True}}]},
        {"type": "array", "items": True, "maxItems": 1.0, "contains": True},
    ],
}

Decoration = Callable[[random.Random, Schema], Schema]


def _names(schema: Schema) -> list[str]:
    return list(schema["properties"])


def _excluding(rng: random.Random, schema: Schema) -> Schema:
    name = rng.choice(_names(schema))
    schema = {**schema, "required": [one for one in schema["required"] if one != name]}
    part = rng.choice([{"required": [name]}, {"properties": {name: {"enum": ["red", 1, True]}}}])
    return {**schema, "not": {**part, "required": [name]}}


def _conditional(rng: random.Random, schema: Schema) -> Schema:
    given, wanted = rng.choices(_names(schema), k=2)
    return {**schema, "if": {"required": [given]}, "then": {"required": [wanted]}}


def _by_value(rng: random.Random, schema: Schema) -> Schema:
    name = rng.choice(_names(schema))
    rule = {"properties": {name: {"type": ["string", "boolean"]}}, "required": [name]}
    return {**schema, "if": rule, "then": {"minProperties": 2}, "else": {"maxProperties": 2}}


def _dependent(rng: random.Random, schema: Schema) -> Schema:
    given, wanted = rng.choices(_names(schema), k=2)
    return {**schema, "dependentRequired": {given: [wanted]}}


def _one_of(rng: random.Random, schema: Schema) -> Schema:
    names = rng.choices(_names(schema), k=2)
    return {**schema, "oneOf": [{"required": [name]} for name in names] + [{"maxProperties": 0}]}


def _counted(rng: random.Random, schema: Schema) -> Schema:
    fewest, most = len(schema["required"]), len(schema["properties"])
    count = rng.choice([float, int])(rng.randint(max(1, fewest), most))
    return {**schema, rng.choice(["minProperties", "maxProperties"]): count}


def _named(rng: random.Random, schema: Schema) -> Schema:
    return {**schema, "propertyNames": rng.choice([{"pattern": "^[a-c]"}, {"maxLength": 1.0}])}


def _open(rng: random.Random, schema: Schema) -> Schema:
    others = rng.choice([_BOOL, {**_DIGIT, "not": {"const": 0}}])
    return {**schema, "additionalProperties": others, "propertyNames": {"pattern": "^[a-e]$"}}


def _unevaluated(rng: random.Random, schema: Schema) -> Schema:
    rest = {key: value for key, value in schema.items() if key != "additionalProperties"}
    more = {"properties": {"z": rng.choice([_BOOL, _DIGIT])}}
    return {**rest, "allOf": [more], "unevaluatedProperties": False}


def _any_of(rng: random.Random, schema: Schema) -> Schema:
    decorated = rng.choice(_DECORATIONS[:6])(rng, schema)
    return {"anyOf": [decorated, {"enum": [rng.randrange(9), None]}]}


_DECORATIONS: Sequence[Decoration] = (
    *(_excluding, _conditional, _by_value, _dependent, _one_of, _counted),
    *(_named, _open, _unevaluated),
)


def _leaf(rng: random.Random) -> Schema:
    bound = rng.randrange(1, 4)
    return rng.choice(
        [
            *(_BOOL, _COLOR, _SHORT, _DIGIT),
            {"const": rng.choice([0, 1.0, "x", None, [1]])},
            {"type": "string", "format": rng.choice(["date", "time", "flavor", "ipv4"])},
            _list(rng.choice([_BOOL, _COLOR, _DIGIT]), uniqueItems=True, minItems=float(bound - 1)),
            _list(contains={"minimum": bound}),
            {**_DIGIT, "not": {"const": bound}},
            {**_DIGIT, "oneOf": [{"minimum": bound}, {"multipleOf": 2}]},
            {
                "type": ["boolean", "null"],
                "if": {"type": "null"},
                "then": rng.choice([True, False]),
            },
            _text(rng.choice(["^(?=a)[ab]{1,2}$", r"^\d$", r"^(?!b)\w$"])),
        ]
    )


def _drawn(seed: int) -> Schema:
    rng = random.Random(seed)
    properties = {name: _leaf(rng) for name in "abc"[: rng.randrange(1, 4)]}
    required = [name for name in properties if rng.random() < 0.4]
    schema = _record(required, **properties)
    for decorate in rng.sample(_DECORATIONS, rng.randrange(1, 3)):
        schema = decorate(rng, schema)
    if rng.random() < 0.2:
        schema = _any_of(rng, schema) if "properties" in schema else schema
    if rng.random() < 0.2:
        schema = {"type": "array", "items": schema, "maxItems": 2, "uniqueItems": True}
    return schema


HARD_SCHEMAS: Mapping[str, Schema] = {
    **{
        f"{keyword} {at}": schema
        for keyword, schemas in _BY_KEYWORD.items()
        for at, schema in enumerate(schemas)
    },
    **{f"drawn {seed}": _drawn(seed) for seed in range(210)},
}
assert len(HARD_SCHEMAS) >= 300
