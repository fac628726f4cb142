"""Pydantic's errors as messages with file, line, key, value and what it must be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from batchinfer.config import (
    SAMPLING_ALIASES,
    AcceptConfig,
    ClassifyConfig,
    EmbedConfig,
    EngineConfig,
    PromptConfig,
    ScoreConfig,
    field_names,
)
from batchinfer.console.format import format_value, listed, near_name, printable
from batchinfer.errors import NotYetError, UsageError
from batchinfer.job.spec.document import JobDocument
from batchinfer.job.spec.on_end import HIDDEN, OnEndSpec
from batchinfer.job.spec.sampling import JobSampling
from batchinfer.job.spec.spec import (
    ErrorsSpec,
    InputSpec,
    JobSpec,
    ModelSpec,
    OutputSpec,
    ReasoningSpec,
    ScaleSpec,
    StatsSpec,
)
from batchinfer.job.spec.yaml import KeyPath, dotted
from batchinfer.near_names import nearest

_MOST_SHOWN = 8
_BRANCHES = (ReasoningSpec.__name__,)
"""Branches of unions that are keys and values, as pydantic's locations name them."""
_NOT_YET = re.compile(r"not yet: (.*) is not supported by this version")

_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "dataclass_type": "keys and values",
    "literal_error": "{expected}",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "greater_than": "more than {gt:g}",
}
"""Words for what a value must be, by pydantic's error type; braces hold its context."""
_LIKE = {
    "model": "Qwen/Qwen3-0.6B",
    "input": "prompts.parquet",
    "sampling": "{max_tokens: 64}",
    "output": "{path: out/answers}",
}
"""Sections that a job needs, as they may look."""


def _names(record: type[BaseModel]) -> tuple[str, ...]:
    return tuple(field.alias or name for name, field in record.model_fields.items())


def known_keys() -> dict[str, tuple[str, ...]]:
    """Keys a user may write, by section; "" is the top level."""
    return {
        "": _names(JobSpec),
        "model": _names(ModelSpec),
        "input": _names(InputSpec),
        "prompt": field_names(PromptConfig),
        "sampling": (*field_names(JobSampling), *SAMPLING_ALIASES),
        "accept": field_names(AcceptConfig),
        "score": field_names(ScoreConfig),
        "embed": field_names(EmbedConfig),
        "classify": field_names(ClassifyConfig),
        "engine": ("preset", *field_names(EngineConfig)),
        "output": _names(OutputSpec),
        "output.reasoning": _names(ReasoningSpec),
        "errors": _names(ErrorsSpec),
        "stats": _names(StatsSpec),
        "scale": _names(ScaleSpec),
        "on_end": _names(OnEndSpec),
    }


def usage_error(error: ValidationError, document: JobDocument) -> UsageError:
    """``error`` as one message of at most a line per problem, and few lines in all."""
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
    """One problem per key: the branches of a union are alternatives of what it must be.

    Where keys within a value are wrong, its other branches are not what was meant; a required key
    that is misspelt is not missing as well.
    """
    by_key: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in details:
        by_key.setdefault(_key_of(detail, document), []).append(detail)
    misspelt = {_nearest_key(path) for path, found in by_key.items() if is_unknown_key(found[0])}
    return [
        _problem(path, found, document)
        for path, found in by_key.items()
        if not (found[0]["type"] == "missing" and path in misspelt)
        and not any(len(other) > len(path) and other[: len(path)] == path for other in by_key)
    ]


def _key_of(detail: ErrorDetails, document: JobDocument) -> KeyPath:
    """The key an error is about: its location, up to a union's branch that has no keys."""
    path: KeyPath = ()
    for part in detail["loc"]:
        if part in _BRANCHES:
            continue
        if not document.has((*path, part)):
            return (*path, part) if detail["type"] == "missing" else path
        path = (*path, part)
    return path


def _problem(path: KeyPath, found: Sequence[ErrorDetails], document: JobDocument) -> _Problem:
    kind = found[0]["type"]
    if kind == "value_error":
        return _said_by_record(path, str(found[0]["ctx"]["error"]), document)
    key, origin = dotted(path), document.origin(path)
    if kind == "missing":
        like = f", like {key}: {_LIKE[key]}" if key in _LIKE else ""
        return _Problem(origin, f"{key} is required{like}")
    if is_unknown_key(found[0]):
        return _Problem(origin, f"unknown key {key}{_suggestion(path)}")
    expected = " or ".join(dict.fromkeys(_expectations(found)))
    given = document.get(path)
    value = HIDDEN if path[:1] == ("on_end",) else format_value(given)
    near = near_name(given, _choices(found)) if isinstance(given, str) else ""
    return _Problem(origin, f"{key} is {value}; it must be {expected}{near}")


def _choices(found: Sequence[ErrorDetails]) -> list[str]:
    """Texts that a value may be."""
    written = (detail["ctx"]["expected"] for detail in found if detail["type"] == "literal_error")
    return [text for one in written for text in re.findall(r"'([^']*)'", one)]


def _expectations(found: Sequence[ErrorDetails]) -> Iterator[str]:
    for detail in found:
        if any(str(part).startswith("tuple[") for part in detail["loc"]):
            yield "a list of texts"
        else:
            yield expectation(detail)


def expectation(detail: ErrorDetails) -> str:
    """Words for what a value must be, to go after "it must be"."""
    if detail["type"] not in _EXPECTED:
        return f"another ({detail['msg']})"
    return _EXPECTED[detail["type"]].format(**detail.get("ctx", {}))


def is_unknown_key(detail: ErrorDetails) -> bool:
    """Whether the mistake is a name that is not known, not a value."""
    return detail["type"] in ("extra_forbidden", "unexpected_keyword_argument")


def _said_by_record(section: KeyPath, message: str, document: JobDocument) -> _Problem:
    """A problem found by a record's own check, whose message names the key."""
    match = _NOT_YET.fullmatch(message)
    text = match.group(1) if match else message
    prefix = dotted(section)
    path = _key_named(section, text, document)
    if prefix and not re.match(rf"{prefix}\b", text):
        text = f"{prefix}.{text}" if _starts_with_key(prefix, text) else f"{prefix}: {text}"
    return _Problem(document.origin(path), text, not_yet=match is not None)


def _key_named(section: KeyPath, text: str, document: JobDocument) -> KeyPath:
    for token in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", text):
        parts: KeyPath = tuple(token.split("."))
        for path in (parts, (*section, *parts)):
            if len(path) > len(section) and document.has(path):
                return path
    return section


def _starts_with_key(section: str, text: str) -> bool:
    match = re.match(r"\w+", text)
    return match is not None and match.group() in known_keys().get(section, ())


def _nearest_key(path: KeyPath) -> KeyPath | None:
    """The known key of its section that an unknown one is most like."""
    near = nearest(str(path[-1]), known_keys().get(dotted(path[:-1]), ()))
    return None if near is None else (*path[:-1], near)


def _suggestion(path: KeyPath) -> str:
    """The nearest known key: in its section, else the same name in another."""
    sections = known_keys()
    name, known = str(path[-1]), sections.get(dotted(path[:-1]), ())
    elsewhere = (f"{other}.{name}".lstrip(".") for other, keys in sections.items() if name in keys)
    if near := near_name(name, known):
        return near
    there = next(elsewhere, None)
    return f"; did you mean {there}?" if there else f"; known here: {listed(known)}"
