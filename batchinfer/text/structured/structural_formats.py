"""Reads the formats of structural tags, and refuses invalid and unsupported ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchinfer.config.settings_base import format_value, near_name
from batchinfer.text.structured.json_schema import exact_schema, inexact_numbers

_FLAGS = ("at_least_one", "stop_after_first")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style"),
    "qwen_xml_parameter": ("json_schema",),
    "grammar": ("grammar",),
    "regex": ("pattern",),
    "any_text": ("excludes", "max_chars"),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("min", "max", "content"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "excludes", *_FLAGS),
    "tags_with_separator": ("tags", "separator", *_FLAGS),
    "dispatch": ("rules", "loop", "excludes"),
}
"""Fields of each format."""
_BEGINS = {"const_string": "value", "tag": "begin"}


class StructuralTagError(ValueError):
    """An invalid or unsupported structural tag; the message says where."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of a structural tag.

    Args:
        where: path of the format in its structural tag, for messages.

    Raises:
        StructuralTagError: the format is unknown, or has an unknown field.
    """

    fields: Mapping[str, Any]
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.fields, Mapping):
            raise self.error(f"is {format_value(self.fields)}; it must be a format")
        if not isinstance(self.kind, str) or self.kind not in _FIELDS:
            known = ", ".join(_FIELDS)
            raise self.error(
                f"has the format {format_value(self.kind)}, which is not supported; known: {known}"
            )
        for key, value in self.fields.items():
            known_here = ("type", *_FIELDS[self.kind])
            if key not in known_here and value is not None and value is not False:
                meant = near_name(str(key), known_here) or f"; known: {', '.join(known_here)}"
                raise self.error(f"has the key {format_value(key)}, which is not supported{meant}")

    @property
    def kind(self) -> Any:
        return self.fields.get("type")

    @property
    def is_endless(self) -> bool:
        """True if the format may be free text of any length."""
        if self.kind == "any_text":
            return self.fields.get("max_chars") is None
        if self.kind == "sequence":
            return self.children("elements")[-1].is_endless
        if self.kind == "or":
            return any(each.is_endless for each in self.children("elements"))
        if self.kind == "tag":
            return not any(self.ends) and self.child("content").is_endless
        if self.kind == "triggered_tags":
            return not all(self.fields.get(flag) for flag in _FLAGS)
        return self.kind == "dispatch" or (
            self.kind == "optional" and self.child("content").is_endless
        )

    @property
    def begin(self) -> str:
        """The text that a ``const_string`` or a ``tag`` begins with; "" for other formats."""
        key = _BEGINS.get(self.kind)
        return self.text(key) if key else ""

    def after(self, begin: str) -> Format:
        """Return a ``const_string`` or a ``tag`` without the first characters of its begin."""
        rest = {_BEGINS[self.kind]: self.begin.removeprefix(begin)}
        return replace(self, fields={**self.fields, **rest})

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts that may end a tag."""
        end = self.fields.get("end", "")
        for text in end if isinstance(end, list) else [end]:
            if not isinstance(text, str):
                raise self._wrong("end", end, "a text, or a list of texts")
        return tuple(end) if isinstance(end, list) else (end,)

    def child(self, key: str) -> Format:
        if key not in self.fields:
            raise self.error(f"has no {key}; it must be a format")
        return Format(self.fields[key], f"{self.where}.{key}")

    def children(self, key: str) -> list[Format]:
        where = f"{self.where}.{key}"
        if key == "tags":  # their type may be missing
            each = [
                {"type": "tag", **one} if isinstance(one, Mapping) else one
                for one in self.items(key)
            ]
        else:
            each = self.items(key)
        return [Format(one, f"{where}[{at}]") for at, one in enumerate(each)]

    def rules(self) -> list[tuple[str, Format]]:
        """Return the texts of a ``dispatch``, each with the format that follows it."""
        read = []
        for at, rule in enumerate(self.items("rules")):
            if not isinstance(rule, list) or len(rule) != 2 or not _is_text(rule[0]):
                raise self._wrong("rules", rule, "a list of [text, format]")
            read.append((rule[0], Format(rule[1], f"{self.where}.rules[{at}][1]")))
        return read

    def text(self, key: str) -> str:
        value = self.fields.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        values = self.fields.get(key) or []
        if not isinstance(values, list) or not all(map(_is_text, values)):
            raise self._wrong(key, values, "a list of texts")
        return values

    def items(self, key: str) -> list[Any]:
        value = self.fields.get(key)
        if not isinstance(value, list) or not value:
            raise self._wrong(key, value, "a list with at least one item")
        return value

    def count(self, key: str) -> int:
        value = self.fields.get(key)
        if type(value) is not int or value < 0:
            raise self._wrong(key, value, "a whole number, at least 0")
        return value

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema, rewritten for grammars."""
        given = self.fields.get("json_schema")
        if not isinstance(given, Mapping) and given is not True:
            raise self._wrong("json_schema", given, "a schema that allows a text")
        schema: Any = exact_schema(given)
        if inexact := inexact_numbers(schema):
            raise self.error(f"has a schema with {inexact[0]}, which no grammar enforces exactly")
        return {} if schema is True else dict(schema)

    def error(self, problem: str) -> StructuralTagError:
        return StructuralTagError(f"{self.where} {problem}")

    def _wrong(self, key: str, value: object, expected: str) -> StructuralTagError:
        return self.error(f"has the {key} {format_value(value)}; it must be {expected}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
