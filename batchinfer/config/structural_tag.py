"""xgrammar's structural tags, which vLLM's ``structural_tag`` takes, as Lark for llguidance.

Free text in which a trigger begins one of several tags: a beginning, a content and an end. Both
forms are read: ``{structures: [{begin, schema, end}], triggers}``, and the later ``{format: {type:
triggered_tags, tags: [{begin, content, end}], triggers}}`` (xgrammar's docs/structural_tag.md;
llguidance's docs/syntax.md for lazy lexemes).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from batchinfer.config.types import format_value

_NAME = "structured_outputs structural_tag"


def structural_grammar(value: Any) -> str:
    """A structural tag, or its JSON text, as a grammar in Lark.

    Raises:
        ValueError: it is none, or of a form that is not supported.
    """
    try:
        tag = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{_NAME} is not JSON: {error}") from None
    if not isinstance(tag, Mapping) or tag.get("type") != "structural_tag":
        raise ValueError(f"{_NAME} is {format_value(tag)}; its type must be structural_tag")
    tags, triggers, at_least_one, only_first = _parts(tag)
    rules = [rule for at, one in enumerate(tags) for rule in _rules(f"tag_{at}", one, triggers)]
    choices = " | ".join(f"tag_{at}" for at in range(len(tags)))
    if only_first:
        start = f"({choices})" if at_least_one else f"({choices}) | TEXT"
    else:
        start = f"({choices}){'+' if at_least_one else '*'} TEXT"
    return "\n".join(["%llguidance {}", f"start: {start}", r"TEXT: /(.|\n)*/", *rules])


def _parts(tag: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[str], bool, bool]:
    """Tags, triggers, whether there is at least one tag, and whether the first ends the text."""
    if "structures" in tag:
        found, form = tag["structures"], tag
        tags = [{**one, "content": {"json_schema": one.get("schema")}} for one in found]
    else:
        form = tag.get("format") or {}
        if form.get("type") != "triggered_tags":
            kind = format_value(form.get("type"))
            raise ValueError(f"not yet: {_NAME} format {kind}; triggered_tags is supported")
        tags = form.get("tags") or []
    triggers = form.get("triggers") or []
    if not tags or not triggers or not all(isinstance(one, str) and one for one in triggers):
        raise ValueError(f"{_NAME} must have tags, and triggers, which are texts")
    once, first = form.get("at_least_one", False), form.get("stop_after_first", False)
    return list(tags), list(triggers), bool(once), bool(first)


def _rules(name: str, tag: Mapping[str, Any], triggers: list[str]) -> list[str]:
    begin, end, content = tag.get("begin"), tag.get("end", ""), tag.get("content") or {}
    trigger = next((one for one in triggers if str(begin).startswith(one)), None)
    if not isinstance(begin, str) or not isinstance(end, str) or trigger is None:
        shown = format_value({"begin": begin, "end": end})
        raise ValueError(f"{_NAME} has {shown}: begin must be a text that starts with a trigger")
    head = [f"{name}_begin[lazy]: TEXT {json.dumps(trigger)}"]
    opened = f"{name}: {name}_begin {_text(begin.removeprefix(trigger))}"
    if content.get("type") == "any_text":
        if not end:
            raise ValueError(f"{_NAME}: any_text needs an end")
        return [*head, f"{opened} {name}_text", f"{name}_text[lazy]: TEXT {json.dumps(end)}"]
    schema = content.get("json_schema")
    if not isinstance(schema, Mapping | bool):
        raise ValueError(
            f"not yet: {_NAME} content {format_value(content.get('type'))}; json_schema, with a "
            "schema, and any_text are supported"
        )
    return [*head, f"{opened} %json {json.dumps(schema)} {_text(end)}"]


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
