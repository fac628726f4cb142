"""Converts ``structured_outputs`` and ``response_format`` to the same form, and validates them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from batchinfer.config.settings_base import format_value, near_name

MAX_CHARACTERS = 2**20
"""Maximum length of a schema, regex, grammar or list of choices, in characters. Compiling a million
words would take gigabytes of memory."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_WHITESPACE = ("disable_any_whitespace", "whitespace_pattern")
_OPTIONS = (*_WHITESPACE, "unsupported")
_NAME = "structured_outputs"


def checked_schema(structured_outputs: Mapping[str, Any] | None) -> str | None:
    """Return the JSON schema to check finished texts against; None if the texts need no check.

    Args:
        structured_outputs: result of ``normalized``.
    """
    if structured_outputs is None or structured_outputs.get("unsupported") != "check":
        return None
    schema: str = structured_outputs.get("json", '{"type": "object"}')
    return schema


def normalized(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Convert ``structured_outputs`` or OpenAI's ``response_format`` to one common form.

    A schema becomes JSON text, because outputs follow the order of its properties, and dicts that
    differ only in order compare equal.

    Args:
        value: ``{json: schema}``, ``{regex: text}``, ``{choice: [texts]}``,
            ``{grammar: Lark or GBNF}``, ``{json_object: true}`` or
            ``{structural_tag: xgrammar's format}``; with a schema also ``unsupported`` and vLLM's
            ``disable_any_whitespace`` or ``whitespace_pattern``. Or OpenAI's ``{type: text}``,
            ``{type: json_object}`` or ``{type: json_schema, json_schema: {schema: ...}}``, with
            ``unsupported``; or a structural tag, ``{type: structural_tag, ...}``.

    Returns:
        One of the first six forms, with its options; None if the text is unconstrained.

    Raises:
        ValueError: the value is invalid; the message names the key.
    """
    if "type" in value:
        value = _of_response_format(value)
        if not value:
            return None
    value = {key: item for key, item in value.items() if item is not None}
    unknown = [key for key in value if key not in (*KINDS, *_OPTIONS)]
    if unknown:
        meant = near_name(str(unknown[0]), (*KINDS, *_OPTIONS)) or f"; known: {', '.join(KINDS)}"
        raise _error(f"has the unknown key {format_value(unknown[0])}{meant}")
    kinds = [kind for kind in KINDS if kind in value]
    if len(kinds) != 1:
        named = " and ".join(kinds) if kinds else "no constraint"
        raise _error(f"has {named}; give exactly one of {', '.join(KINDS)}")
    (kind,) = kinds
    result = {kind: _checked(kind, value[kind]), **_options(kind, value)}
    if len(str(result[kind])) > MAX_CHARACTERS:
        raise _error(f"{kind} has more than {MAX_CHARACTERS:,} characters")
    return result


def _of_response_format(value: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = value["type"]
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": value}
    if kind != "json_schema":
        raise _error(
            f"type is {format_value(kind)}; it must be text, json_object, json_schema or "
            "structural_tag"
        )
    holder = value.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if schema is None:
        raise _error("of type json_schema needs json_schema: {schema: ...}")
    return {"json": schema, "unsupported": value.get("unsupported")}


def _checked(kind: str, value: Any) -> Any:
    if kind == "json":
        return schema_text(f"{_NAME} json", value)
    if kind == "choice":
        return _choices(value)
    if kind == "json_object":
        if value is not True:
            raise _error(f"json_object is {format_value(value)}; it must be true")
        return True
    if kind == "structural_tag":
        return _structural_tag(value)
    return _text(kind, value)


def _structural_tag(value: Any) -> str:
    loaded, text = _json(f"{_NAME} structural_tag", value)
    if not isinstance(loaded, Mapping) or loaded.get("type") != "structural_tag":
        raise _error(
            f"structural_tag is {format_value(loaded)}; it must be an object whose type is "
            "structural_tag"
        )
    return text


def schema_text(key: str, value: Any) -> str:
    """Return the JSON text of a schema, given as data or text, with its keys in order.

    Raises:
        ValueError: the schema is invalid; the message names ``key``.
    """
    loaded, text = _json(key, value)
    if not isinstance(loaded, Mapping | bool):
        raise ValueError(
            f"{key} is {format_value(loaded)}; it must be a JSON schema, which is an object"
        )
    return text


def _json(key: str, value: Any) -> tuple[Any, str]:
    """Return a value that is data or JSON text as both."""
    try:
        loaded = json.loads(value) if isinstance(value, str) else value
        return loaded, json.dumps(loaded, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError(f"{key} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key} is not JSON: {error}") from None


def _choices(value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not value:
        raise _error(f"choice is {format_value(value)}; it must be a non-empty list of strings")
    for text in value:
        if not isinstance(text, str):
            raise _error(
                f"choice contains {format_value(text)}, which is not a string: put it in quotes"
            )
    return [_text("choice", text) for text in value]


def _options(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value[key] for key in _OPTIONS if key in value}
    if options and kind not in ("json", "json_object"):
        raise _error(f"{next(iter(options))} can be combined with json, but not with {kind}")
    if all(key in options for key in _WHITESPACE):
        raise _error(f"has both {' and '.join(_WHITESPACE)}; keep one")
    compact = options.get("disable_any_whitespace", False)
    if not isinstance(compact, bool):
        raise _error(f"disable_any_whitespace is {format_value(compact)}; it must be true or false")
    if "whitespace_pattern" in options:
        _text("whitespace_pattern", options["whitespace_pattern"])
    unsupported = options.pop("unsupported", "refuse")
    if unsupported not in ("refuse", "check"):
        raise _error(f"unsupported is {format_value(unsupported)}; it must be refuse or check")
    return options if unsupported == "refuse" else {**options, "unsupported": "check"}


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _error(f"{key} is {format_value(value)}; it must be a non-empty string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _error(f"{key} contains half of a surrogate pair") from None
    return value


def _error(problem: str) -> ValueError:
    return ValueError(f"{_NAME} {problem}")
