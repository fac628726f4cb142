"""Judges finished samples: which of them pass, and which of those are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from batchinfer.config import AcceptConfig


class AcceptError(ValueError):
    """What is to be accepted cannot be judged: why, in a line."""


class Verdict(Enum):
    """What becomes of a sample."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    DUPLICATE = "duplicate"
    SURPLUS = "surplus"
    """Enough are kept already; it is not looked at."""


@dataclass
class RowVerdicts:
    """The verdicts on a row's samples, in order."""

    wanted: int
    verdicts: list[Verdict] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)

    def count(self, verdict: Verdict) -> int:
        """Samples that it was passed on."""
        return self.verdicts.count(verdict)

    @property
    def is_full(self) -> bool:
        """Whether as many are kept as are wanted."""
        return self.count(Verdict.ACCEPTED) >= self.wanted


class Judge:
    """Judges samples as ``accept`` says.

    Raises:
        AcceptError: the schema is none, or its package is not installed.
    """

    def __init__(self, config: AcceptConfig) -> None:
        self._config = config
        self._regex = None if config.regex is None else re.compile(config.regex)
        self._validator = None if config.schema is None else _validator(str(config.schema))

    def judge(self, samples: Iterable[tuple[str, int]], wanted: int) -> RowVerdicts:
        """Judge a row's samples.

        Args:
            samples: text and number of tokens of each, in the order of their indices.
            wanted: how many to keep.
        """
        row = RowVerdicts(wanted)
        for text, num_tokens in samples:
            row.verdicts.append(self._verdict(text, num_tokens, row))
        return row

    def _verdict(self, text: str, num_tokens: int, row: RowVerdicts) -> Verdict:
        if row.is_full:
            return Verdict.SURPLUS
        if not self._passes(text, num_tokens):
            return Verdict.REJECTED
        if self._config.dedup and text in row.texts:
            return Verdict.DUPLICATE
        row.texts.add(text)
        return Verdict.ACCEPTED

    def _passes(self, text: str, num_tokens: int) -> bool:
        if num_tokens < self._config.min_tokens:
            return False
        if self._regex is not None and self._regex.search(text) is None:
            return False
        if self._validator is None:
            return True
        try:
            value = json.loads(text, parse_constant=_no_json)
            return bool(self._validator.is_valid(value))
        except (ValueError, RecursionError, ArithmeticError):  # of 1e400, which is infinite
            return False


def _no_json(constant: str) -> Any:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{constant} is no JSON")


def _validator(schema: str) -> Any:
    try:
        import jsonschema
        from jsonschema.validators import validator_for
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError:
        raise AcceptError(
            "schema needs the package jsonschema: pip install 'batchinfer[structured]'"
        ) from None
    loaded = json.loads(schema)
    dialect = loaded.get("$schema", "") if isinstance(loaded, Mapping) else ""
    if not isinstance(dialect, str):
        raise AcceptError("schema is wrong: $schema must be a text")
    kind = validator_for(loaded, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(loaded)
        _check_references(loaded, kind)
    except Unresolvable as error:
        raise AcceptError(
            f"schema is wrong: it refers to {error.ref}, which is not in it; nothing is fetched"
        ) from None
    except jsonschema.SchemaError as error:
        raise AcceptError(f"schema is wrong: {error.message}") from None
    except (RecursionError, re.error) as error:
        raise AcceptError(f"schema is wrong: {error or 'it is nested too deeply'}") from None
    return kind(loaded, registry=Registry())  # an empty one, for jsonschema's own fetches


def _check_references(schema: Any, kind: Any) -> None:
    """Look up all that a schema refers to.

    Raises:
        Unresolvable: something is not there.
    """
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012, specification_with

    specification = specification_with(kind.META_SCHEMA.get("$schema", ""), default=DRAFT202012)
    whole = specification.create_resource(schema)
    registry: Registry[Any] = Registry()
    todo = [(whole, registry.resolver_with_root(whole))]
    while todo:
        resource, resolver = todo.pop()
        if isinstance(resource.contents, Mapping):
            for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                if isinstance(to := resource.contents.get(key), str):
                    resolver.lookup(to)
        todo += [(part, resolver.in_subresource(part)) for part in resource.subresources()]
