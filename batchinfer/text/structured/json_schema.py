"""JSON schemas as grammars can have them: spelt out exactly, or widened to what a grammar can say.

Rewriting goes by JSON Schema's keywords (https://json-schema.org/draft/2020-12): what stands below
``properties`` is a name, below ``enum`` a value, and neither is taken for a keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from batchinfer.config.regex import with_ascii_classes
from batchinfer.text.structured.formats import GRAMMAR_FORMATS, PATTERNS
from batchinfer.text.structured.schema_work import target

Keywords = dict[str, Any]
"""A schema that is no boolean."""

_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
"""Keywords that hold schemas by names."""
_DATA = frozenset(("const", "enum", "default", "examples"))
"""Keywords that hold values."""
_COUNTS = (
    *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_VALUES = (
    *("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_DRAFTS_OF_LONE_REFERENCES = ("draft-03", "draft-04", "draft-06", "draft-07")
"""Drafts in which nothing beside a reference counts."""
_BESIDE_REFERENCES = frozenset(("$ref", "$schema", "definitions", "$defs"))
_LARGEST = 2**63
"""Larger whole numbers are out of llguidance's range."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "not": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
"""Keywords that no grammar has, and their values that ask for nothing."""
_UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
        *("unevaluatedProperties", "unevaluatedItems"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    )
)
"""Keywords that no grammar has. Each only takes texts away, so that more remain without it."""
_APART = (
    ("pattern", "format", "minLength", "maxLength"),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ("minItems", "maxItems"),
)
"""Keywords on one value, which can be tried apart from the rest of a schema."""


def exact_schema(schema: Any) -> Any:
    """A schema that allows the same, in the words that grammars are made from.

    Counts such as ``2.0`` are whole numbers, classes in patterns are ASCII's, what asks for nothing
    is left out. Formats that a calendar or a rule decides are patterns, and those that are not
    known are annotations, as JSON Schema has them.
    """
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(draft, str) and any(old in draft for old in _DRAFTS_OF_LONE_REFERENCES):
        schema = _rewritten(schema, _reference_alone)
    return _rewritten(schema, _spelt_out)


def inexact_numbers(schema: Any) -> list[int]:
    """Numbers among a schema's values that grammars, made by way of doubles, would change."""
    found = list[int]()

    def collect(keywords: Keywords) -> Keywords:
        for key in _VALUES:
            found.extend(_inexact(keywords.get(key)))
        return keywords

    _rewritten(schema, collect)
    return found


def widened_schema(schema: Any) -> Any:
    """A schema of the keywords that a grammar can have: it allows all that ``schema`` does.

    ``not``, ``if`` and others are left out as a whole, and with them the schemas in them: within
    them a keyword that is left out would take texts away. One of several becomes any of them.
    References to what is gone go as well, and numbers that a grammar would change.
    """
    return _without_broken_references(_rewritten(schema, _without_unsupported))


def loosened_schema(schema: Any, compiles: Callable[[Keywords], bool]) -> Any:
    """A widened schema without the keywords that no grammar is made of: it allows all it did.

    Args:
        compiles: whether there is a grammar of keywords by themselves.
    """

    def change(keywords: Keywords) -> Keywords:
        kept = _without(keywords, ("minProperties", "maxProperties"))
        if not str(kept.get("$ref", "#")).startswith("#"):
            kept = _without(kept, ("$ref",))
        for group in _APART:
            part = {key: kept[key] for key in group if key in kept}
            if part and not compiles(part):
                alone = {key: value for key, value in part.items() if compiles({key: value})}
                kept = _without(kept, part) | (alone if alone and compiles(alone) else {})
        names = {key: kept[key] for key in ("patternProperties",) if key in kept}
        if names and not compiles(names):
            # Without them their names are additional ones, whose values may be of another kind.
            kept = _without(kept, ("patternProperties", "additionalProperties"))
        return kept

    return _rewritten(schema, change)


def outermost_type(schema: Any) -> Any:
    """A schema that says of what type the text is, if ``schema`` does."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    return {} if kind is None else {"type": kind}


def _rewritten(schema: Any, change: Callable[[Keywords], Keywords]) -> Any:
    """A schema in which ``change`` was made to every schema, the innermost first."""
    if isinstance(schema, list):
        return [_rewritten(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = dict[str, Any]()
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            inner[key] = {name: _rewritten(one, change) for name, one in value.items()}
        else:
            inner[key] = value if key in _DATA else _rewritten(value, change)
    return change(inner)


def _reference_alone(keywords: Keywords) -> Keywords:
    if not isinstance(keywords.get("$ref"), str):
        return keywords
    return {key: value for key, value in keywords.items() if key in _BESIDE_REFERENCES}


def _spelt_out(keywords: Keywords) -> Keywords:
    changed = {key: item for key, item in keywords.items() if not _is_neutral(key, item)}
    if "if" not in changed:
        changed = _without(changed, ("then", "else"))
    if "contains" not in changed:
        changed = _without(changed, ("minContains", "maxContains"))
    for key in _COUNTS:
        count = changed.get(key)
        if isinstance(count, float) and count.is_integer():
            changed[key] = int(count)
    if isinstance(changed.get("pattern"), str):
        changed["pattern"] = with_ascii_classes(changed["pattern"])
    if isinstance(names := changed.get("patternProperties"), dict):
        changed["patternProperties"] = {with_ascii_classes(name): names[name] for name in names}
    return _with_format(changed)


def _is_neutral(key: str, value: Any) -> bool:
    return any(type(value) is type(one) and value == one for one in _NEUTRAL.get(key, ()))


def _with_format(keywords: Keywords) -> Keywords:
    name = keywords.get("format")
    if not isinstance(name, str) or name in GRAMMAR_FORMATS:
        return keywords
    rest = _without(keywords, ("format",))
    if name not in PATTERNS:
        return rest
    return _with_all_of(rest, [{"pattern": pattern} for pattern in PATTERNS[name]])


def _with_all_of(keywords: Keywords, schemas: list[Keywords]) -> Keywords:
    others = keywords.get("allOf", [])
    return keywords | {"allOf": [*others, *schemas] if isinstance(others, list) else others}


def _without_unsupported(keywords: Keywords) -> Keywords:
    inexact = [key for key in _VALUES if any(_inexact(keywords.get(key)))]
    kept = _without(keywords, {*_UNSUPPORTED, *inexact})
    if isinstance(kept.get("oneOf"), list):  # branches that are widened may overlap
        one_of = {"anyOf": kept.pop("oneOf")}
        kept = _with_all_of(kept, [one_of]) if "anyOf" in kept else kept | one_of
    return kept


def _inexact(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inexact(item)
    elif isinstance(value, int) and (abs(value) > _LARGEST or int(float(value)) != value):
        yield value


def _without_broken_references(schema: Any) -> Any:
    def change(keywords: Keywords) -> Keywords:
        name = keywords.get("$ref", "")
        pointer = isinstance(name, str) and name.startswith("#/")
        broken = pointer and target(name, schema, {}) is None
        return _without(keywords, ("$ref",)) if broken else keywords

    return _rewritten(schema, change)


def _without(keywords: Keywords, keys: Container[str]) -> Keywords:
    return {key: value for key, value in keywords.items() if key not in keys}
