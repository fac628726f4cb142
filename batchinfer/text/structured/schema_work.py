"""Computes an upper bound on the work of validating a value against a JSON schema.

References can make the work exponential: forty schemas that each refer twice to the next schema
cause 10^12 visits, and so do a few schemas that refer to themselves twice for each level of a
nested value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_REFERENCES = frozenset(("$ref", "$dynamicRef", "$recursiveRef"))
_OF_ITEMS = frozenset(("items", "prefixItems", "additionalItems", "contains", "unevaluatedItems"))
_OF_NAMES = frozenset(("additionalProperties", "propertyNames", "unevaluatedProperties"))
_OF_ITSELF = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "then", "else"))
_BY_NAME = frozenset(("dependentSchemas", "dependencies"))
_UNEVALUATED = 3
"""How often the keywords next to ``unevaluated...`` are visited, measured with jsonschema-rs."""
_NAMES = ("$anchor", "$dynamicAnchor", "$id", "id")

GROWING = (*_REFERENCES, "unevaluatedItems", "unevaluatedProperties")
"""If a schema has none of these keywords, the work is at most the size of the schema times the size
of the value."""


def num_steps(schema: Any, value: Any) -> int:
    """Return an upper bound on the number of visits to subschemas while a value is validated."""
    named = dict(_named(schema))
    counts: dict[tuple[int, int], int] = {}

    def count(place: Any, held: Any) -> int:
        if not isinstance(place, dict):
            return 1
        key = id(place), id(held)
        if key not in counts:
            counts[key] = 0  # 0 while in progress, so that a cycle at the same value ends
            steps = sum(count(*pair) for pair in _parts(place, held, schema, named))
            grows = any(name.startswith("unevaluated") for name in place)
            counts[key] = 1 + steps * (_UNEVALUATED if grows else 1)
        return counts[key]

    return count(schema, value)


def _parts(
    place: dict[str, Any], value: Any, root: Any, named: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield pairs: a schema that ``place`` directly contains or refers to, and a part of
    ``value`` to which it applies."""
    fields = value if isinstance(value, dict) else {}
    items = value if isinstance(value, list) else []
    for key, held in place.items():
        if key in _REFERENCES and isinstance(held, str):
            yield target(held, root, named), value
        elif key == "properties":
            yield from ((held[name], fields[name]) for name in fields if name in held)
        elif key in _OF_NAMES or key == "patternProperties":
            schemas = held.values() if key == "patternProperties" else [held]
            yield from ((one, field) for one in schemas for field in fields.values())
        elif key in _OF_ITEMS:
            schemas = held if isinstance(held, list) else [held]
            yield from ((one, item) for one in schemas for item in items)
        elif key in _OF_ITSELF:
            yield from ((one, value) for one in (held if isinstance(held, list) else [held]))
        elif key in _BY_NAME:
            yield from ((one, value) for one in held.values())


def _named(place: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(place, dict):
        for key in _NAMES:
            if isinstance(name := place.get(key), str):
                yield name.rpartition("/")[2].removesuffix("#"), place
    for one in place.values() if isinstance(place, dict) else place:
        if isinstance(one, dict | list):
            yield from _named(one)


def target(reference: str, root: Any, named: dict[str, Any]) -> Any:
    """Return the target of a reference in a schema, or None.

    Args:
        named: schemas, keyed by their anchors and by the last parts of their ids.
    """
    base, _, fragment = reference.partition("#")
    place = named.get(base.rpartition("/")[2], root)
    if not fragment.startswith("/"):
        return named.get(fragment) if fragment else place
    for part in unquote(fragment).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return place
