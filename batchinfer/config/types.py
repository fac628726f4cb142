"""Types and values of a record's fields: coerced, required, read as sizes, shown in messages."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping
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
    str: "a text",
    NoneType: "None",
}
_PLURALS: Mapping[Any, str] = {int: "whole numbers", float: "numbers", str: "texts"}

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class Record:
    """A frozen dataclass of settings: no other keys, and docstrings of fields describe them.

    Raises:
        TypeError: naming the field, when a value is of another type.
        ValueError: naming the field, when a value is out of range or does not go with another.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {format_value(getattr(self, name))}; it must be {what}")


def coerce_fields(record: Any) -> None:
    """Convert in place what means the same: lists to tuples, whole numbers to floats, numpy's
    numbers to Python's. A bool is no number.

    Args:
        record: a dataclass instance; its fields are annotated with bool, int, float, str, None,
            ``Literal``, ``tuple[X, ...]``, ``Mapping[K, V]``, ``Any`` and unions of these.

    Raises:
        TypeError: naming the field, its value and what it must be.
    """
    kind: Any = type(record)
    for name, hint in _hints(kind).items():
        value = getattr(record, name)
        try:
            object.__setattr__(record, name, _taken(value, hint))
        except _UnfitError:
            raise TypeError(f"{name} is {reprlib.repr(value)}; it must be {_words(hint)}") from None


class _UnfitError(Exception):
    """A value is not of a type."""


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


def _taken(value: Any, hint: Any) -> Any:
    """``value`` as the type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _first_taken(value, args)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_taken(item, args[0]) for item in value)
    if origin is Mapping and isinstance(value, Mapping):
        return {_taken(key, args[0]): _taken(item, args[1]) for key, item in value.items()}
    if hint is int and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if hint is float and isinstance(value, Real) and not isinstance(value, bool):
        return _as_float(value)
    if hint is Any or (origin is Literal and isinstance(value, str) and value in args):
        return value
    if hint in (bool, str, NoneType) and isinstance(value, hint):
        return value
    raise _UnfitError


def _first_taken(value: Any, hints: tuple[Any, ...]) -> Any:
    for hint in hints:
        try:
            return _taken(value, hint)
        except _UnfitError:
            continue
    raise _UnfitError


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:
        raise _UnfitError from None


def _words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, args))
    if origin is Literal:
        return " or ".join(args)
    if origin is tuple:
        return f"a list of {_PLURALS.get(args[0], 'values')}"
    if origin is Mapping:
        return f"a dict of {_PLURALS[args[0]]} and their {_PLURALS.get(args[1], 'values')}"
    return _WORDS[hint]


def parse_size(value: str | int | float, key: str) -> int:
    """Bytes meant by ``"40GiB"``, ``"512 MB"`` or a bare number, which is GiB.

    Raises:
        ValueError: naming ``key``, when the text is not a size.
    """
    match = _SIZE.fullmatch(str(value))
    if isinstance(value, bool) or match is None:
        raise ValueError(f"{key}: {json.dumps(value)} is not a size; write it like 40GiB or 512MiB")
    number, unit = match.groups()
    return int(float(number) * _UNITS[(unit or "GiB").lower()])


def format_value(value: object) -> str:
    """A value as a job file writes it, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def near_name(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one; nothing if none is."""
    question = meant(name, known)
    return f"; {question}" if question else ""
