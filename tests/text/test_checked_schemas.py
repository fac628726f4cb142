"""Schemas that a grammar enforces only in part, and the check of finished texts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from batchinfer.config import SamplingParams
from batchinfer.text.structured.compiled_grammar import (
    CompiledGrammar,
    GrammarCompiler,
    check_structured_outputs,
)
from batchinfer.text.structured.grammar_source import GrammarError
from batchinfer.text.structured.json_schema import (
    exact_schema,
    loosened_schema,
    outermost_type,
    widened_schema,
)
from batchinfer.text.structured.json_validator import JsonValidator
from tests.job.fakes import byte_tokenizer
from tests.text.hard_schemas import HARD_SCHEMAS
from tests.text.test_grammar import accepts, asked, text_of

BYTES = GrammarCompiler(byte_tokenizer(), frozenset({0}), 257)
NUM_GROUPS = 8
"""Number of tests that share the hard schemas, so that they can run at the same time."""
SCALARS = (None, True, False, 0, 1, 2, 3, 4.0, 5, 7.5, "a", "ab", "red", "2024-02-29", [], [1], {})


def grammar_of(schema: Any, **options: Any) -> CompiledGrammar:
    return BYTES.compile(asked(json=schema, **options))


def takes(schema: Any, text: str, **options: Any) -> bool:
    return accepts(grammar_of(schema, **options), byte_tokenizer(), 0, text)


def changed(value: Any, rng: random.Random) -> Any:
    """Return a copy of a value with one change."""
    if isinstance(value, dict) and rng.random() < 0.8:
        fields, name = dict(value), rng.choice("abcz")
        if name in fields and rng.random() < 0.3:
            del fields[name]
        else:
            fields[name] = changed(fields.get(name), rng)
        return fields
    if isinstance(value, list) and rng.random() < 0.8:
        items, at = list(value), rng.randrange(len(value) + 1)
        items[at : at + rng.randrange(2)] = [changed(value[at] if at < len(value) else None, rng)]
        return items
    return rng.choice(SCALARS)


def instances(schema: Any, count: int) -> Iterator[str]:
    """Yield texts that a schema may or may not allow."""
    rng = random.Random(str(schema))
    grammar = grammar_of(schema, unsupported="check")
    for scalar in SCALARS:
        yield json.dumps(scalar)
    for seed in range(count):
        text = text_of(grammar, byte_tokenizer(), 0, seed, most=120)
        if text is None:
            continue
        yield text
        value = json.loads(text)
        for _ in range(4):
            value = changed(value, rng)
            yield json.dumps(value)


@pytest.mark.parametrize("first", range(NUM_GROUPS))
def test_exact_schemas_allow_the_same_texts_and_widened_schemas_more(first: int) -> None:
    for name in islice(HARD_SCHEMAS, first, None, NUM_GROUPS):
        schema = HARD_SCHEMAS[name]
        exact = exact_schema(schema)
        widened = widened_schema(exact)
        wider = [widened, outermost_type(exact)]
        wider += [loosened_schema(widened, lambda _, drop=drop: not drop) for drop in (False, True)]
        wider += [loosened_schema(widened, lambda keywords: len(keywords) < 2)]
        original = JsonValidator(json.dumps(schema), check_formats=True)
        same, *others = (JsonValidator(json.dumps(other)) for other in (exact, *wider))
        annotates = "format" in str(schema)  # then the original schema is stricter
        for text in instances(schema, 6):
            if original.allows(text):
                assert all(other.allows(text) for other in (same, *others)), (name, text)
            else:
                assert annotates or not same.allows(text), (name, text)


def test_schemas_without_exact_grammar_compile_with_unsupported_check() -> None:
    refused = 0
    for schema in HARD_SCHEMAS.values():
        check_structured_outputs(asked(json=schema, unsupported="check"))
        try:
            check_structured_outputs(asked(json=schema))
        except GrammarError:
            refused += 1
    assert len(HARD_SCHEMAS) >= 300
    assert refused >= 250


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "items": {"type": "null"}, "minItems": 1.0, "maxItems": 1.0}, "[null]"),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, '"ab"'),
        ({"type": "object", "minProperties": 1.0, "maxProperties": 1.0}, '{"a":1}'),
        ({"const": 0.0}, "0"),
        ({"enum": [2.0]}, "2"),
        ({"type": "string", "format": "color-of-the-sky"}, '"blue"'),
        ({"type": "string", "format": "regex"}, '"("'),
        ({"type": "integer", "format": "color-of-the-sky"}, "1"),
        ({"type": "array", "uniqueItems": False}, "[1,1]"),
        ({"type": "integer", "then": False}, "1"),
        ({"type": "array", "minContains": 3}, "[]"),
        (True, "1"),
    ],
)
def test_exact_schema_rewrites_keywords(schema: Any, text: str) -> None:
    assert takes(schema, text)
    assert JsonValidator(json.dumps(schema)).allows(text)


def test_constant_zero_may_be_written_in_any_form() -> None:
    """The grammar writes the shortest form; the validator accepts every form."""
    for constant in (0, 0.0):
        assert takes({"const": constant}, "0")
        for text in ("0", "0.0", "-0", "0e3"):
            assert JsonValidator(json.dumps({"const": constant})).allows(text)


RIGHT = {
    "date": ["2024-02-29", "2000-02-29", "1999-12-31", "2023-04-30", "0001-01-01"],
    "time": ["23:59:59Z", "23:59:60Z", "23:59:60.25z", "00:00:00.5+23:59", "12:00:00-00:30"],
    "date-time": ["2024-02-29T23:59:60Z", "1985-04-12t23:20:50.52z"],
    "hostname": ["a", "A-1.example", "1.2", "a" * 63, ".".join(["ab" * 31] * 4)],
    "email": ["a@b", "joe.bloggs+x@mail.example.co.uk", "a'b@c-d.e"],
}
WRONG = {
    "date": ["2023-02-29", "2024-02-30", "1900-02-29", "2023-04-31", "2023-13-01", "2023-1-01"],
    "time": ["24:00:00Z", "12:00:60Z", "12:60:00Z", "12:00:00", "12:00:00+24:00"],
    "date-time": ["2023-02-29T00:00:00Z", "2023-02-28 00:00:00Z", "2023-02-28T12:00:60Z"],
    "hostname": ["-a", "a-", "a..b", "a_b", "a" * 64, ".".join(["ab" * 31] * 4) + ".cde", "ab--c"],
    "email": ["a@", "@b", "a..b@c", ".a@b", "a@-b", "a@b." + "c" * 64],
}


@pytest.mark.parametrize("name", RIGHT)
def test_format_patterns_follow_calendar_and_rfcs(name: str) -> None:
    """The grammar and the validator agree."""
    schema = {"type": "string", "format": name}
    judge = JsonValidator(json.dumps(schema), check_formats=True)
    for text in map(json.dumps, RIGHT[name]):
        assert takes(schema, text)
        assert judge.allows(text)
    for text in map(json.dumps, WRONG[name]):
        assert not takes(schema, text)
        assert not judge.allows(text)


@pytest.mark.parametrize("name", [*RIGHT, "ipv4", "ipv6", "uuid", "duration", "uri"])
def test_generated_texts_have_their_format(name: str) -> None:
    schema = {"type": "string", "format": name}
    judge = JsonValidator(json.dumps(schema), check_formats=True)
    texts = [text_of(grammar_of(schema), byte_tokenizer(), 0, seed) for seed in range(60)]
    assert all(judge.allows(text) for text in texts if text is not None)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 12345678910111213},
        {"enum": [1, [2**53 + 1]]},
        {"type": "integer", "minimum": 2**53 + 1},
    ],
)
def test_numbers_beyond_double_precision_are_not_in_the_grammar(schema: Any) -> None:
    with pytest.raises(GrammarError, match=r"no grammar can enforce \d+ exactly; set unsupported"):
        grammar_of(schema)
    grammar_of(schema, unsupported="check")


@pytest.mark.parametrize("keyword", ["not", "if", "contains", "uniqueItems", "dependentRequired"])
def test_unsupported_schema_error_suggests_unsupported_check(keyword: str) -> None:
    value = {"uniqueItems": True, "dependentRequired": {"a": ["b"]}}.get(keyword, {"const": 1})
    with pytest.raises(GrammarError, match=f"{keyword}.*; set unsupported: check to check"):
        grammar_of({keyword: value})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strnig", "not": {}},
        {"not": {"type": 3}},
        {"uniqueItems": 1},
        {"if": {"minLength": -1}},
        {"$ref": "#/$defs/none", "not": {}},
        {"contains": {"$ref": "http://127.0.0.1:9/other.json"}},
        {"not": {"pattern": "("}},
    ],
)
def test_invalid_schema_is_refused_with_unsupported_check(schema: Any) -> None:
    with pytest.raises(GrammarError, match="schema is not valid"):
        grammar_of(schema, unsupported="check")


@pytest.mark.parametrize(
    "schema", [False, {"enum": [], "not": {}}, {"type": "integer", "minimum": 5, "maximum": 2}]
)
def test_unsatisfiable_schema_is_an_error(schema: Any) -> None:
    with pytest.raises(GrammarError, match=r"no text can match|Unsatisfiable schema"):
        grammar_of(schema, unsupported="check")


def test_unsupported_key_needs_a_schema() -> None:
    assert asked(json={}, unsupported="refuse") == asked(json={})
    assert asked(json={}, unsupported="check")["unsupported"] == "check"
    schema: dict[str, Any] = {"type": "json_schema", "json_schema": {"schema": {}}}
    assert asked(**schema, unsupported="check") == asked(json={}, unsupported="check")
    for wrong, message in [
        ({"json": {}, "unsupported": "ignore"}, "unsupported is .ignore.; it must be refuse or"),
        (
            {"regex": "a", "unsupported": "check"},
            "unsupported can be combined with json, but not with regex",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            SamplingParams(structured_outputs=wrong)


@pytest.mark.parametrize(
    ("schema", "text", "problem"),
    [
        ({"items": {"maximum": 3}}, "[1, 7]", "at /1: 7 is greater than the maximum of 3"),
        ({}, '{"a": ', "it is not JSON: Expecting value"),
        ({}, "NaN", "it is not JSON: NaN is not JSON"),
        ({"format": "date"}, '"2023-02-30"', '"2023-02-30" is not a "date"'),
        ({"type": "null"}, f'"{"x" * 999}"', "...x"),
    ],
)
def test_validation_problem_is_one_line(schema: Any, text: str, problem: str) -> None:
    found = JsonValidator(json.dumps(schema), check_formats=True).problem(text)
    assert found.startswith(problem)
    assert "\n" not in found
    assert len(found) < 250


def doubling(last: Any, keyword: str = "allOf", depth: int = 40) -> dict[str, Any]:
    """Return a schema in which each definition refers to the next one twice."""
    schemas = {
        f"a{at}": {keyword: [{"$ref": f"#/$defs/a{at + 1}"}, {"$ref": f"#/$defs/a{at + 1}"}]}
        for at in range(depth)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**schemas, f"a{depth}": last}}


def unevaluated(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"properties": {"x": {}}, "unevaluatedProperties": False}
    for _ in range(depth):
        schema = {"allOf": [schema], "unevaluatedProperties": False}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        doubling({"type": "object"}),
        doubling({"type": "object"}, "anyOf"),
        doubling({"properties": {"x": {"$ref": "#/$defs/a0"}}}, depth=18),
        {"$id": "http://x/y.json", **doubling({}), "$ref": "y.json#/$defs/a0"},
        unevaluated(40),
    ],
)
def test_validation_of_exponential_schemas_is_bounded(schema: Any) -> None:
    judge = JsonValidator(json.dumps(schema))
    text = '{"x": {"x": {"x": 1}}}'
    assert not judge.allows(text)
    assert judge.problem(text) == "validating it takes more than 10,000,000 steps"


def test_cyclic_references_are_validated() -> None:
    node = {"properties": {name: {"$ref": "#"} for name in ("left", "right")}, "required": ["v"]}
    tree: dict[str, Any] = {"v": 0}
    for _ in range(12):
        tree = {"v": 1, "left": tree, "right": tree}
    assert JsonValidator(json.dumps(node)).allows(json.dumps(tree))
    assert not JsonValidator(json.dumps(node)).allows('{"v": 1, "left": {}}')
    assert JsonValidator('{"allOf": [{"$ref": "#"}], "type": "object"}').allows("{}")
