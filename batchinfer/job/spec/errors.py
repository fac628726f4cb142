"""Turns pydantic errors into messages that name the file, line, key, value and valid values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from batchinfer.console.format import format_value, listed, near_name, printable
from batchinfer.errors import NotYetError, UsageError
from batchinfer.job.spec.document import JobDocument
from batchinfer.job.spec.json_schema import json_schema
from batchinfer.job.spec.sections import HIDDEN
from batchinfer.job.spec.yaml import KeyPath, dotted
from batchinfer.near_names import nearest

_MOST_SHOWN = 8
_NOT_YET = re.compile(r"(.*) is not yet supported by this version")

_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "string_too_short": "a non-empty string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "dataclass_type": "a mapping of keys to values",
    "literal_error": "{expected}",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "greater_than": "more than {gt:g}",
}
"""Descriptions of valid values, keyed by pydantic's error type. Braces hold keys of the error's
``ctx``.
"""
_LIKE = {
    "model": "Qwen/Qwen3-0.6B",
    "input": "prompts.parquet",
    "sampling": "{max_tokens: 64}",
    "sampling.max_tokens": "64 (maximum tokens per answer)",
    "output": "{path: out/answers}",
}
"""Example values of required keys."""


@cache
def known_keys() -> Mapping[str, tuple[str, ...]]:
    """Return the keys that a user may write, keyed by section; "" is the top level."""
    schema = json_schema()
    return dict(_sections("", schema, schema["$defs"]))


def _sections(
    name: str, value: Mapping[str, Any], records: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for choice in (value, *value.get("anyOf", ())):
        record = records[choice["$ref"].rpartition("/")[2]] if "$ref" in choice else choice
        if keys := record.get("properties"):
            yield name, tuple(keys)
            for key, held in keys.items():
                yield from _sections(f"{name}.{key}".lstrip("."), held, records)


def usage_error(error: ValidationError, document: JobDocument) -> UsageError:
    """Make an error whose message has a line for each of the first ``_MOST_SHOWN`` problems."""
    problems = _problems(error.errors(include_url=False), document)
    if all(problem.not_yet for problem in problems):
        return NotYetError("; ".join(f"{p.text} ({p.origin})" for p in problems[:_MOST_SHOWN]))
    lines = [printable(f"{problem.origin}: {problem.text}") for problem in problems]
    more = len(lines) - _MOST_SHOWN
    return UsageError("\n".join(lines[:_MOST_SHOWN] + [f"and {more} more"] * (more > 0)))


@dataclass(frozen=True)
class _Problem:
    origin: str
    text: str
    not_yet: bool = False


def _problems(details: Sequence[ErrorDetails], document: JobDocument) -> list[_Problem]:
    """Combine the errors of each key, because pydantic reports one error per branch of a union.

    If keys inside a value have errors, the errors of the value itself are dropped. A misspelled
    required key is not also reported as missing.
    """
    by_key: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in details:
        by_key.setdefault(_key_of(detail, document), []).append(detail)
    misspelled = {_nearest_key(path) for path, found in by_key.items() if is_unknown_key(found[0])}
    return [
        _problem(path, found, document)
        for path, found in by_key.items()
        if not (found[0]["type"] == "missing" and path in misspelled)
        and not any(len(other) > len(path) and other[: len(path)] == path for other in by_key)
    ]


def _key_of(detail: ErrorDetails, document: JobDocument) -> KeyPath:
    """Find the key of an error: its location without the names of union branches."""
    path: KeyPath = ()
    for part in detail["loc"]:
        if document.has((*path, part)):
            path = (*path, part)
    return (*path, detail["loc"][-1]) if detail["type"] == "missing" else path


def _problem(path: KeyPath, errors: Sequence[ErrorDetails], document: JobDocument) -> _Problem:
    kind = errors[0]["type"]
    if kind == "value_error":
        return _problem_of_record(path, str(errors[0]["ctx"]["error"]), document)
    key, origin = dotted(path), document.origin(path)
    if kind == "missing":
        like = f", like {key}: {_LIKE[key]}" if key in _LIKE else ""
        return _Problem(origin, f"{key} is required{like}")
    if is_unknown_key(errors[0]):
        return _Problem(origin, f"unknown key {key}{_suggestion(path)}")
    expected = " or ".join(dict.fromkeys(map(expectation, errors)))
    raw_value = document.get(path)
    value = HIDDEN if path[:1] == ("on_end",) else format_value(raw_value)
    near = near_name(raw_value, _choices(errors)) if isinstance(raw_value, str) else ""
    return _Problem(origin, f"{key} is {value}; it must be {expected}{near}")


def _choices(errors: Sequence[ErrorDetails]) -> list[str]:
    written = (detail["ctx"]["expected"] for detail in errors if detail["type"] == "literal_error")
    return [text for one in written for text in re.findall(r"'([^']*)'", one)]


def expectation(detail: ErrorDetails) -> str:
    """Describe valid values, as the end of a sentence that begins "it must be"."""
    if detail["type"] not in _EXPECTED:
        return f"another value ({detail['msg']})"
    return _EXPECTED[detail["type"]].format(**detail.get("ctx", {}))


def is_unknown_key(detail: ErrorDetails) -> bool:
    return detail["type"] in ("extra_forbidden", "unexpected_keyword_argument")


def _problem_of_record(section: KeyPath, message: str, document: JobDocument) -> _Problem:
    """Make a problem from a message that names a key, raised by the validator of ``section``."""
    match = _NOT_YET.fullmatch(message)
    text = match.group(1) if match else message
    origin = document.origin(_key_named(section, text, document))
    prefix = dotted(section)
    if prefix and not re.match(rf"{prefix}\b", text):
        is_key = re.split(r"\W", text)[0] in known_keys().get(prefix, ())
        text = f"{prefix}.{text}" if is_key else f"{prefix}: {text}"
    return _Problem(origin, text, not_yet=match is not None)


def _key_named(section: KeyPath, text: str, document: JobDocument) -> KeyPath:
    for token in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", text):
        parts: KeyPath = tuple(token.split("."))
        for path in (parts, (*section, *parts)):
            if len(path) > len(section) and document.has(path):
                return path
    return section


def _nearest_key(path: KeyPath) -> KeyPath | None:
    """Find the known key of the section that is most similar to an unknown key."""
    near = nearest(str(path[-1]), known_keys().get(dotted(path[:-1]), ()))
    return None if near is None else (*path[:-1], near)


def _suggestion(path: KeyPath) -> str:
    """Suggest the nearest key of the section, or the same key in another section."""
    name, known = str(path[-1]), known_keys().get(dotted(path[:-1]), ())
    if near := near_name(name, known):
        return near
    for section, keys in known_keys().items():
        if name in keys:
            return f"; did you mean {f'{section}.{name}'.lstrip('.')}?"
    return f"; the known keys are: {listed(known)}"
