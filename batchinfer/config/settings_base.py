"""Base class of settings, which checks the types and ranges of fields."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from batchinfer.near_names import meant

_WORDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    NoneType: "None",
}
_PLURALS: Mapping[Any, str] = {int: "whole numbers", float: "numbers", str: "strings"}

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class Record:
    """Base class of settings, which are frozen dataclasses. The reference documentation is
    generated from their field docstrings.

    Raises:
        TypeError: a value has the wrong type; the message names the field.
        ValueError: a value is out of range or conflicts with another value; the message names the
            field.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {format_value(getattr(self, name))}; it must be {what}")


def coerce_fields(record: Any) -> None:
    """Convert values in place: lists to tuples, integers to floats, numpy numbers to Python's.

    Args:
        record: a dataclass instance, whose fields have annotations of bool, int, float, str, None,
            ``Literal``, ``tuple[X, ...]``, ``Mapping[K, V]``, ``Any`` and unions of these; a bool
            is not a number.

    Raises:
        TypeError: a value has the wrong type; the message names the field, the value and the valid
            type.
    """
    kind: Any = type(record)
    for name, hint in _hints(kind).items():
        value = getattr(record, name)
        try:
            object.__setattr__(record, name, _coerced(value, hint))
        except _WrongTypeError:
            raise TypeError(f"{name} is {reprlib.repr(value)}; it must be {_words(hint)}") from None


class _WrongTypeError(Exception):
    """A value does not have the required type."""


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


def _coerced(value: Any, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for choice in args:
            with suppress(_WrongTypeError):
                return _coerced(value, choice)
        raise _WrongTypeError
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_coerced(item, args[0]) for item in value)
    if origin is Mapping and isinstance(value, Mapping):
        return {_coerced(key, args[0]): _coerced(item, args[1]) for key, item in value.items()}
    if hint is int and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if hint is float and isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    if hint is Any or (origin is Literal and isinstance(value, str) and value in args):
        return value
    if hint in (bool, str, NoneType) and isinstance(value, hint):
        return value
    raise _WrongTypeError


def _words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, args))
    if origin is Literal:
        return " or ".join(args)
    if origin is tuple:
        return f"a list of {_PLURALS.get(args[0], 'values')}"
    if origin is Mapping:
        return f"a dict that maps {_PLURALS[args[0]]} to {_PLURALS.get(args[1], 'values')}"
    return _WORDS[hint]


def parse_size(value: str | int | float, key: str) -> int:
    """Return the bytes of a size such as ``"40GiB"``, ``"512 MB"`` or a bare number of GiB.

    Raises:
        ValueError: the text is not a size; the message names ``key``.
    """
    match = _SIZE.fullmatch(str(value))
    if isinstance(value, bool) or match is None:
        raise ValueError(f"{key}: {json.dumps(value)} is not a size; write it like 40GiB or 512MiB")
    number, unit = match.groups()
    return int(float(number) * _UNITS[(unit or "GiB").lower()])


def format_value(value: object) -> str:
    """Format a value as in a job file, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def near_name(name: str, known: Iterable[str]) -> str:
    """Return text to append to an error about an unknown name: the nearest known name, or ""."""
    question = meant(name, known)
    return f"; {question}" if question else ""
