"""vLLM's ``StructuredOutputsParams`` and ``GuidedDecodingParams``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.config.structural_tag import structural_grammar
from batchinfer.config.structured import KINDS

_KINDS = (*KINDS, "structural_tag")


@dataclass
class StructuredOutputsParams:
    """What a text must look like; give one of the first five, or a structural tag.

    Raises:
        ValueError: none of them is given, or several.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, or its JSON text."""
    regex: str | None = None
    choice: list[str] | None = None
    """The texts that it may be."""
    grammar: str | None = None
    """In Lark, or in GBNF (llama.cpp's, xgrammar's EBNF)."""
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    """No whitespace between the parts of JSON."""
    disable_additional_properties: bool = False
    """Objects have no other properties than their schema names, unless it says that they may."""
    whitespace_pattern: str | None = None
    """What comes between the parts of JSON, as an expression."""
    structural_tag: str | Mapping[str, Any] | None = None
    """xgrammar's: tags with contents of their own in free text; triggered tags of JSON or text."""
    unsupported: str | None = None
    """check: a schema that no grammar can insist on is what finished texts are judged by."""
    backend: str | None = None
    """Without effect: there is one."""
    disable_fallback: bool = False
    """Without effect."""

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            what = " and ".join(given) if given else "nothing"
            raise ValueError(f"{type(self).__name__} has {what}; give one of {', '.join(_KINDS)}")

    def mapping(self) -> dict[str, Any]:
        """What is given, as ``SamplingParams.structured_outputs`` of a job has it."""
        if self.structural_tag is not None:
            return {"grammar": structural_grammar(self.structural_tag)}
        names = (*KINDS, "whitespace_pattern", "unsupported")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.disable_any_whitespace and ("json" in found or "json_object" in found):
            found["disable_any_whitespace"] = True
        if self.disable_additional_properties and isinstance(found.get("json"), Mapping):
            found["json"] = closed_schema(found["json"])
        return found


@dataclass
class GuidedDecodingParams(StructuredOutputsParams):
    """vLLM's earlier name of ``StructuredOutputsParams``."""

    @staticmethod
    def from_optional(**given: Any) -> GuidedDecodingParams | None:
        """The parameters, or None where no form of text is given."""
        kept = {name: value for name, value in given.items() if value is not None}
        return GuidedDecodingParams(**kept) if any(kind in kept for kind in _KINDS) else None


def closed_schema(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it names, unless it says so."""
    if isinstance(schema, list):
        return [closed_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: closed_schema(value) for key, value in schema.items()}
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
