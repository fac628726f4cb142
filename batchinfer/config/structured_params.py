"""vLLM's ``StructuredOutputsParams`` and ``GuidedDecodingParams``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.config.structured import KINDS


@dataclass
class StructuredOutputsParams:
    """A constraint on the output text: one of the first five fields, or ``structural_tag``.

    Raises:
        ValueError: there is no constraint, or more than one.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, or its JSON text."""
    regex: str | None = None
    choice: list[str] | None = None
    """Allowed texts."""
    grammar: str | None = None
    """A grammar in Lark or GBNF (llama.cpp's format, xgrammar's EBNF)."""
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    """True: no whitespace between the parts of JSON."""
    disable_additional_properties: bool = False
    """True: objects may have only the properties that their schema lists, unless the schema sets
    additionalProperties."""
    whitespace_pattern: str | None = None
    """Regex for the whitespace between the parts of JSON."""
    structural_tag: str | Mapping[str, Any] | None = None
    """xgrammar's format, such as free text with tags that hold JSON; or its JSON text."""
    unsupported: str | None = None
    """check: if a grammar cannot enforce the schema, check finished texts against the schema."""
    backend: str | None = None
    """Has no effect."""
    disable_fallback: bool = False
    """Has no effect."""

    def __post_init__(self) -> None:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            what = " and ".join(kinds) if kinds else "no constraint"
            raise ValueError(
                f"{type(self).__name__} has {what}; give exactly one of {', '.join(KINDS)}"
            )

    def mapping(self) -> dict[str, Any]:
        """Return the value for ``SamplingParams.structured_outputs``."""
        names = (*KINDS, "whitespace_pattern", "unsupported")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.disable_any_whitespace and ("json" in options or "json_object" in options):
            options["disable_any_whitespace"] = True
        if self.disable_additional_properties and isinstance(options.get("json"), Mapping):
            options["json"] = closed_schema(options["json"])
        return options


@dataclass
class GuidedDecodingParams(StructuredOutputsParams):
    """vLLM's earlier name for ``StructuredOutputsParams``."""

    @staticmethod
    def from_optional(**given: Any) -> GuidedDecodingParams | None:
        """Return the parameters, or None if no constraint is given."""
        kept = {name: value for name, value in given.items() if value is not None}
        return GuidedDecodingParams(**kept) if any(kind in kept for kind in KINDS) else None


def closed_schema(schema: Any) -> Any:
    """Return a copy of a schema in which every object schema that does not set
    ``additionalProperties`` forbids additional properties."""
    if isinstance(schema, list):
        return [closed_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: closed_schema(value) for key, value in schema.items()}
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
