"""Converts ``structured_outputs`` to grammars in llguidance's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from batchinfer.config.regex import with_ascii_classes
from batchinfer.config.structured import checked_schema
from batchinfer.text.structured.gbnf import GbnfError, is_gbnf, lark_of
from batchinfer.text.structured.json_schema import (
    exact_schema,
    inexact_numbers,
    loosened_schema,
    outermost_type,
    widened_schema,
)
from batchinfer.text.structured.json_validator import JsonValidator, SchemaError
from batchinfer.text.structured.structural_formats import StructuralTagError
from batchinfer.text.structured.structural_tag import structural_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Source = Callable[[], str]
"""Returns a grammar in llguidance's format, or raises GrammarError."""

_WHITESPACE = r" |\r?\n[ \t]{0,40}"
"""Default pattern of whitespace between the parts of JSON: as json.dumps writes it, with or without
an indent. JSON itself allows unlimited whitespace, and small models would write whitespace without
end.
"""
_UNSUPPORTED = ("Unimplemented keys", "oneOf constraints", "min/maxProperties", "patternProperty")
"""Beginnings of llguidance's messages about valid schemas that grammars cannot enforce."""
_HINT = "set unsupported: check to check finished texts against the whole schema instead"


class GrammarError(ValueError):
    """A grammar that cannot be compiled for this model; the message is one line with the reason."""


def sources(
    structured_outputs: Mapping[str, Any], compiles: Callable[[Source], bool]
) -> Iterator[Source]:
    """Yield the grammar to use. With ``unsupported: check``, yield several grammars, each allowing
    more texts than the previous grammar; the caller uses the first grammar that compiles.

    Args:
        structured_outputs: the result of ``config.structured.normalized``.

    Raises:
        GrammarError: the schema is invalid.
    """
    if "json" not in structured_outputs and "json_object" not in structured_outputs:
        yield partial(_source, structured_outputs)
        return
    text = structured_outputs.get("json", '{"type": "object"}')
    try:
        if checked_schema(structured_outputs) is not None:
            JsonValidator(text, check_formats=True)
        for schema in _schemas(text, structured_outputs, compiles):
            yield partial(_json_source, schema, structured_outputs)
    except SchemaError as error:
        raise GrammarError(str(error)) from None
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


def _schemas(
    text: str, structured_outputs: Mapping[str, Any], compiles: Callable[[Source], bool]
) -> Iterator[Any]:
    exact = exact_schema(json.loads(text))
    if exact is False:
        raise GrammarError("no text can match: the schema is false")
    if checked_schema(structured_outputs) is None:
        if inexact := inexact_numbers(exact):
            raise GrammarError(f"no grammar can enforce {inexact[0]} exactly; {_HINT}")
        yield exact
        return

    @cache
    def is_possible(keywords: str) -> bool:
        return compiles(partial(_json_source, json.loads(keywords), {}))

    yield (widened := widened_schema(exact))
    yield loosened_schema(widened, lambda keywords: is_possible(json.dumps(keywords)))
    yield outermost_type(exact)


def _json_source(schema: Any, options: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    overrides: JsonCompileOptions = {"whitespace_flexible": False}
    if not options.get("disable_any_whitespace"):
        overrides = {"whitespace_pattern": options.get("whitespace_pattern", _WHITESPACE)}
    try:
        text = json.dumps({} if schema is True else schema, ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(text, overrides=overrides)
    except ValueError as error:
        raise GrammarError(in_a_line(str(error))) from None
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


def _source(structured_outputs: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    ((kind, value),) = structured_outputs.items()
    if kind == "regex":
        return LLMatcher.grammar_from_regex(with_ascii_classes(value))
    if kind == "choice":
        # Use a terminal: each alternative of a rule would take one of the parser's 2,000 rows, and
        # long lists would fail, sometimes in the middle of a text.
        texts = " | ".join(map(json.dumps, value))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if kind == "structural_tag":
        try:
            return LLMatcher.grammar_from_lark(structural_lark(value, _WHITESPACE))
        except StructuralTagError as error:
            raise GrammarError(str(error)) from None
        except RecursionError:
            raise GrammarError("the structural tag is nested too deeply") from None
    return LLMatcher.grammar_from_lark(_lark(value))


def _lark(grammar: str) -> str:
    if is_gbnf(grammar):
        try:
            return lark_of(grammar)
        except GbnfError as error:
            raise GrammarError(f"Failed to convert the grammar from GBNF: {error}") from None
    if ":" not in grammar:
        raise GrammarError(
            "Failed to convert the grammar: it has no Lark rules (start: ...) and "
            "no GBNF rules (root ::= ...)"
        )
    return grammar


def in_a_line(text: str) -> str:
    """Return llguidance's message on one line, without details for llguidance's developers."""
    lines = [line.strip() for line in text.partition("<state>")[0].splitlines()]
    of_expression = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if of_expression:
        return f"a regular expression is not valid: {of_expression[0]}"
    if "NoExtension" in text:
        return "no text can match"
    line = next(filter(None, lines), "it is not valid").partition(":  (And")[0]
    if line.startswith(_UNSUPPORTED):
        return f"{line}; {_HINT}"
    return line
