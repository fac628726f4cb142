"""Validates finished texts against a JSON schema, using the jsonschema-rs package."""

from __future__ import annotations

import json
import math
from typing import Any

from batchinfer.errors import install_command
from batchinfer.text.structured.schema_work import GROWING, num_steps

MAX_BACKTRACKS = 1_000_000
"""Maximum number of backtracking steps when matching one pattern of a schema."""
MAX_STEPS = 10_000_000
"""Maximum number of subschema visits for one text; such a text takes 0.5 s to a few seconds."""
_MAX_MESSAGE = 200


class SchemaError(ValueError):
    """A schema that cannot be used for validation; the message gives the reason on one line."""


class JsonValidator:
    """Validates texts against a JSON schema.

    Patterns use ECMAScript syntax and are matched in linear time if possible, else with limited
    backtracking. References to other documents are not fetched. The default draft is 2020-12. A
    text that takes too much work to validate is not allowed.

    Args:
        schema: JSON text of the schema.
        check_formats: True to enforce ``format``.

    Raises:
        SchemaError: the schema is invalid, or the package is not installed.
    """

    def __init__(self, schema: str, *, check_formats: bool = False) -> None:
        try:
            import jsonschema_rs
        except ImportError:
            raise SchemaError(
                f"schema needs the package jsonschema-rs: {install_command('structured')}"
            ) from None
        options = jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS)
        try:
            self._schema = json.loads(schema)
            self._validator = jsonschema_rs.validator_for(
                self._schema,
                offline=True,
                validate_formats=check_formats,
                pattern_options=options,
            )
            self._may_grow = any(f'"{key}"' in schema for key in GROWING)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            raise SchemaError(f"schema is not valid: {error.message}") from None
        except (ValueError, RecursionError) as error:
            raise SchemaError(
                f"schema is not valid: {error or 'it is nested too deeply'}"
            ) from None

    def allows(self, text: str) -> bool:
        try:
            return bool(self._validator.is_valid(self._value(text)))
        except (ValueError, RecursionError):
            return False

    def problem(self, text: str) -> str:
        """Return on one line why a text is not allowed."""
        try:
            error = next(self._validator.iter_errors(self._value(text)), None)
        except _TooMuchWorkError as too_much:
            return str(too_much)
        except (ValueError, RecursionError) as not_json:
            return f"it is not JSON: {not_json}"
        if error is None:
            return "it is allowed"
        place = "".join(f"/{part}" for part in error.instance_path)
        message = " ".join(error.message.split())
        if len(message) > _MAX_MESSAGE:
            message = f"...{message[-_MAX_MESSAGE:]}"  # the end of the message names the problem
        return f"at {place}: {message}" if place else message

    def _value(self, text: str) -> Any:
        value = json.loads(text, parse_constant=_no_json, parse_float=_number)
        if self._may_grow and num_steps(self._schema, value) > MAX_STEPS:
            raise _TooMuchWorkError(f"validating it takes more than {MAX_STEPS:,} steps")
        return value


class _TooMuchWorkError(ValueError):
    """A text takes too much work to validate."""


def _no_json(constant: str) -> Any:
    """Refuse NaN and Infinity, which Python accepts."""
    raise ValueError(f"{constant} is not JSON")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text} is too large")
    return value
