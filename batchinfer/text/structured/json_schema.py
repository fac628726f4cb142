"""Rewrites JSON schemas for grammars: exactly, or widened to what a grammar can express.

Keywords are those of JSON Schema (https://json-schema.org/draft/2020-12). Keys in ``properties``
are names, and values of ``enum`` are data, so neither are keywords.

The regular expressions for values of ``format`` are strict: they allow only dates that exist,
second 60 only at leap seconds (RFC 3339, section 5.7), and host names and labels up to the maximum
lengths (RFC 1123, section 2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from batchinfer.config.regex import with_ascii_classes
from batchinfer.text.structured.schema_work import target

Keywords = dict[str, Any]
"""A schema that is not a boolean."""

_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
"""Keywords whose values map names to schemas."""
_DATA = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are data, not schemas."""
_COUNTS = (
    *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_VALUES = (
    *("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_DRAFTS_OF_LONE_REFERENCES = ("draft-03", "draft-04", "draft-06", "draft-07")
"""Drafts in which keywords next to a reference are ignored."""
_BESIDE_REFERENCES = frozenset(("$ref", "$schema", "definitions", "$defs"))
_LARGEST = 2**63
"""Limit of llguidance on the absolute value of integers."""
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
"""Values with which these keywords have no effect; no grammar supports other values of them."""
_UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
        *("unevaluatedProperties", "unevaluatedItems"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    )
)
"""Keywords that no grammar supports. Each keyword only restricts texts, so a schema without the
keyword allows more texts."""
_APART = (
    ("pattern", "format", "minLength", "maxLength"),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ("minItems", "maxItems"),
)
"""Groups of keywords. A group compiles independently of the rest of a schema."""

GRAMMAR_FORMATS = frozenset(("duration", "ipv4", "ipv6", "uuid", "uri"))
"""Formats for which llguidance's own regular expressions are correct."""

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = (
    rf"(?:{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR_MINUTE})"
    r"|23:59:60(?:\.[0-9]+)?[Zz])"
)
_ALNUM, _INNER = "[0-9A-Za-z]", "[0-9A-Za-z-]"
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]"


def exact_schema(schema: Any) -> Any:
    """Rewrite ``schema`` for llguidance, to a schema that allows the same texts.

    Counts like ``2.0`` become whole numbers, classes in patterns become ASCII classes, and keywords
    without effect are dropped. Formats become patterns. Unknown formats are dropped, because JSON
    Schema treats them as annotations.
    """
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(draft, str) and any(old in draft for old in _DRAFTS_OF_LONE_REFERENCES):
        schema = _rewritten(schema, _reference_alone)
    return _rewritten(schema, _spelled_out)


def inexact_numbers(schema: Any) -> list[int]:
    """Return the numbers in a schema that a grammar would change by converting them to doubles."""
    numbers = list[int]()

    def collect(keywords: Keywords) -> Keywords:
        for key in _VALUES:
            numbers.extend(_inexact(keywords.get(key)))
        return keywords

    _rewritten(schema, collect)
    return numbers


def widened_schema(schema: Any) -> Any:
    """Return a schema that a grammar supports and that allows every text that ``schema`` allows.

    The result has no ``not``, ``if`` and similar keywords, because dropping a keyword inside them
    would restrict texts. ``oneOf`` becomes ``anyOf``. Broken references and numbers that a grammar
    would change are dropped too.
    """
    return _without_broken_references(_rewritten(schema, _without_unsupported))


def loosened_schema(schema: Any, compiles: Callable[[Keywords], bool]) -> Any:
    """Drop from a widened schema the keywords that do not compile. Dropping keywords never excludes
    a text.

    Args:
        compiles: returns True if keywords compile by themselves.
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
            # Remove additionalProperties too: without the patterns, it would apply to the names
            # that match the patterns.
            kept = _without(kept, ("patternProperties", "additionalProperties"))
        return kept

    return _rewritten(schema, change)


def outermost_type(schema: Any) -> Any:
    """Return a schema with only the type of ``schema``; empty if ``schema`` names no type."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    return {} if kind is None else {"type": kind}


def _rewritten(schema: Any, change: Callable[[Keywords], Keywords]) -> Any:
    """Apply ``change`` to a schema and all schemas in it, innermost schemas first."""
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


def _spelled_out(keywords: Keywords) -> Keywords:
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
    existing = keywords.get("allOf", [])
    return keywords | {"allOf": [*existing, *schemas] if isinstance(existing, list) else existing}


def _without_unsupported(keywords: Keywords) -> Keywords:
    inexact = [key for key in _VALUES if any(_inexact(keywords.get(key)))]
    kept = _without(keywords, {*_UNSUPPORTED, *inexact})
    if isinstance(kept.get("oneOf"), list):  # branches may overlap after they were widened
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


def _label(most: int) -> str:
    """Return a pattern for a label of a host name. The pattern excludes labels with hyphens in
    positions 3 and 4, because these labels are Punycode (``xn--...``)."""
    longer = f"{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM}){_INNER}{{0,{most - 5}}}{_ALNUM}"
    return f"{_ALNUM}(?:{_ALNUM}|{_INNER}{{1,2}}{_ALNUM}|{longer})?"


_MAILBOX = rf"{_ATOM}(?:\.?{_ATOM}){{0,31}}"
"""The part of an e-mail address before the @, up to 63 characters, although 64 would be valid."""
_MAIL_HOST = rf"{_label(40)}(?:\.{_label(40)}){{0,5}}"
"""The host of an e-mail address, up to 245 characters, because the valid limit of 253 takes too
much work."""

PATTERNS: Mapping[str, tuple[str, ...]] = {
    "date": (f"^{_DATE}$",),
    "time": (f"^{_TIME}$",),
    "date-time": (f"^{_DATE}[Tt]{_TIME}$",),
    "hostname": (rf"^{_label(63)}(?:\.{_label(63)})*$", "^.{1,253}$"),
    "email": (f"^{_MAILBOX}@{_MAIL_HOST}$",),
}
"""The patterns of each format; a string must match all patterns of its format."""
