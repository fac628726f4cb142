"""vLLM's ``StructuredOutputsParams`` and ``GuidedDecodingParams``, and xgrammar's structural tags.

A structural tag describes free text in which a trigger starts a tag. A tag has a beginning, content
and an end. This module translates structural tags to Lark for llguidance. Two forms are accepted:
``{structures: [{begin, schema, end}], triggers}`` and the newer ``{format: {type: triggered_tags,
tags: [{begin, content, end}], triggers}}`` (xgrammar's docs/structural_tag.md; llguidance's
docs/syntax.md for lazy lexemes).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.config.structured import KINDS
from batchinfer.config.types import format_value

_KINDS = (*KINDS, "structural_tag")
_TAG = "structured_outputs structural_tag"


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
    """xgrammar's format: free text with triggered tags that hold JSON or text."""
    unsupported: str | None = None
    """check: if a grammar cannot enforce the schema, check finished texts against the schema."""
    backend: str | None = None
    """Has no effect."""
    disable_fallback: bool = False
    """Has no effect."""

    def __post_init__(self) -> None:
        kinds = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            what = " and ".join(kinds) if kinds else "no constraint"
            raise ValueError(
                f"{type(self).__name__} has {what}; give exactly one of {', '.join(_KINDS)}"
            )

    def mapping(self) -> dict[str, Any]:
        """Return the value for ``SamplingParams.structured_outputs``."""
        if self.structural_tag is not None:
            return {"grammar": structural_grammar(self.structural_tag)}
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
        return GuidedDecodingParams(**kept) if any(kind in kept for kind in _KINDS) else None


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


def structural_grammar(value: Any) -> str:
    """Convert a structural tag, given as data or as JSON text, to a Lark grammar.

    Raises:
        ValueError: the value is not a structural tag, or has an unsupported form.
    """
    try:
        tag = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{_TAG} is not JSON: {error}") from None
    if not isinstance(tag, Mapping) or tag.get("type") != "structural_tag":
        raise ValueError(f"{_TAG} is {format_value(tag)}; its type must be structural_tag")
    tags, triggers, at_least_one, only_first = _parts(tag)
    rules = [rule for at, one in enumerate(tags) for rule in _rules(f"tag_{at}", one, triggers)]
    choices = " | ".join(f"tag_{at}" for at in range(len(tags)))
    if only_first:
        start = f"({choices})" if at_least_one else f"({choices}) | TEXT"
    else:
        start = f"({choices}){'+' if at_least_one else '*'} TEXT"
    return "\n".join(["%llguidance {}", f"start: {start}", r"TEXT: /(.|\n)*/", *rules])


def _parts(tag: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[str], bool, bool]:
    """Return the tags, the triggers, and two flags: whether a tag is required, and whether the
    first tag ends the text."""
    if "structures" in tag:
        found, form = tag["structures"], tag
        tags = [{**one, "content": {"json_schema": one.get("schema")}} for one in found]
    else:
        form = tag.get("format") or {}
        if form.get("type") != "triggered_tags":
            kind = format_value(form.get("type"))
            raise ValueError(f"{_TAG} format {kind} is not yet supported; only triggered_tags is")
        tags = form.get("tags") or []
    triggers = form.get("triggers") or []
    if not tags or not triggers or not all(isinstance(one, str) and one for one in triggers):
        raise ValueError(
            f"{_TAG} must have tags and triggers, and triggers must be non-empty strings"
        )
    once, first = form.get("at_least_one", False), form.get("stop_after_first", False)
    return list(tags), list(triggers), bool(once), bool(first)


def _rules(name: str, tag: Mapping[str, Any], triggers: list[str]) -> list[str]:
    begin, end, content = tag.get("begin"), tag.get("end", ""), tag.get("content") or {}
    trigger = next((one for one in triggers if str(begin).startswith(one)), None)
    if not isinstance(begin, str) or not isinstance(end, str) or trigger is None:
        shown = format_value({"begin": begin, "end": end})
        raise ValueError(f"{_TAG} has {shown}: begin must be a string that starts with a trigger")
    head = [f"{name}_begin[lazy]: TEXT {json.dumps(trigger)}"]
    opened = f"{name}: {name}_begin {_text(begin.removeprefix(trigger))}"
    if content.get("type") == "any_text":
        if not end:
            raise ValueError(f"{_TAG}: any_text needs an end string")
        return [*head, f"{opened} {name}_text", f"{name}_text[lazy]: TEXT {json.dumps(end)}"]
    schema = content.get("json_schema")
    if not isinstance(schema, Mapping | bool):
        raise ValueError(
            f"{_TAG} content {format_value(content.get('type'))} is not yet supported; only "
            "any_text and json_schema (with a schema) are"
        )
    return [*head, f"{opened} %json {json.dumps(schema)} {_text(end)}"]


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
