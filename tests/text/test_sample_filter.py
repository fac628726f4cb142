from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.config import AcceptConfig
from batchinfer.text.sample_filter import AcceptError, RowVerdicts, SampleFilter, Verdict

A, R, D, S = Verdict


def verdicts(texts: list[str], wanted: int = 9, **config: Any) -> list[Verdict]:
    sample_filter, row = SampleFilter(AcceptConfig(**config)), RowVerdicts(wanted)
    for text in texts:
        sample_filter.apply(row, [(text, len(text), True)])
    return row.verdicts


@pytest.mark.parametrize(
    ("config", "texts", "expected"),
    [
        ({}, ["a", "", "a"], [A, A, A]),
        ({"regex": "b+"}, ["abc", "ac", "b"], [A, R, A]),
        ({"regex": "^b$"}, ["abc", "b"], [R, A]),
        ({"min_tokens": 2}, ["a", "ab", "abc"], [R, A, A]),
        ({"dedup": True}, ["a", "b", "a"], [A, A, D]),
        ({"dedup": True, "regex": "a"}, ["b", "b", "a", "a"], [R, R, A, D]),
        (
            {"schema": {"type": "object", "required": ["a"]}},
            ['{"a": 1}', "{}", "{", "3", "[" * 100_000],
            [A, R, R, R, R],
        ),
        ({"schema": '{"type": "integer"}', "regex": "3"}, ["3", "4", "x3"], [A, R, R]),
        ({"schema": {"multipleOf": 0.5}}, ["1.5", "1e400", "NaN", "[Infinity]"], [A, R, R, R]),
        ({"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}}, ["1", "2"], [A, R]),
        ({"schema": {"items": {"$ref": "#"}}}, ["[[1]]", "["], [A, R]),
        ({"schema": {"format": "date"}}, ['"no date"', '"\\ud800"'], [A, R]),
    ],
)
def test_accept_rules_judge_samples(
    config: dict[str, Any], texts: list[str], expected: list[Verdict]
) -> None:
    assert verdicts(texts, **config) == expected


SLOW = "a" * 60 + "b"


@pytest.mark.parametrize("pattern", ["(a+)+$", "^(a|aa)+$", r"^(\w*)*$"])
def test_accept_regex_takes_linear_time(pattern: str) -> None:
    long = "a" * 1_000_000
    assert verdicts([f"{long}!", long, SLOW + "!"], regex=pattern) == [R, A, R]


@pytest.mark.parametrize("pattern", ["^(a|aa)+$", r"^(?=(a|aa)+$)", r"^(a|b|ab)*\1$(?!x)"])
def test_backtracking_of_schema_patterns_is_bounded(pattern: str) -> None:
    for schema in ({"pattern": pattern}, {"propertyNames": {"pattern": pattern}}):
        judged = verdicts([json.dumps(SLOW), json.dumps({SLOW: 1}), '{"aa": 1}'], schema=schema)
        assert judged == ([R, A, A] if "pattern" in schema else [A, R, A])
    schema = {"patternProperties": {pattern: True}, "additionalProperties": False}
    assert verdicts([json.dumps({SLOW: 1}), '{"aa": 1}'], schema=schema) == [R, A]


@given(st.lists(st.sampled_from("abcd")), st.integers(1, 5), st.booleans())
def test_first_accepted_samples_are_kept(texts: list[str], wanted: int, dedup: bool) -> None:
    found = verdicts(texts, wanted, regex="[abc]", dedup=dedup)
    passing = [at for at, text in enumerate(texts) if text != "d"]
    if dedup:
        passing = [at for at in passing if texts.index(texts[at]) == at]
    assert [at for at, verdict in enumerate(found) if verdict is A] == passing[:wanted]
    if len(passing) >= wanted:
        after = passing[wanted - 1] + 1
        assert set(found[after:]) <= {S}
        assert S not in found[:after]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strnig"},
        {"pattern": "("},
        {"$ref": "#/$defs/none"},
        {"properties": {"a": {"items": {"$ref": "http://127.0.0.1:9/other.json"}}}},
    ],
)
def test_invalid_accept_schema_is_an_error(schema: dict[str, Any]) -> None:
    with pytest.raises(AcceptError, match="schema is not valid"):
        SampleFilter(AcceptConfig(schema=schema))


def test_jsonschema_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema_rs", None)
    with pytest.raises(AcceptError, match=r"pip install '\.\[structured\]'"):
        SampleFilter(AcceptConfig(schema={}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "("}, "regex is not valid: missing \\): \\(; write it in RE2 syntax"),
        ({"regex": "a(?!b)"}, "regex is not valid: invalid perl operator: .*; write"),
        ({"regex": r"(a)\1"}, "regex is not valid: invalid escape sequence: .*; write it"),
        ({"regex": "((a{100}){100}){100}"}, "regex is not valid: .*; write it in"),
        ({"regex": "(" * 999}, "regex is not valid: .*; write it in"),
        ({"regex": "\ud800"}, "regex is not valid: it contains half of a surrogate pair"),
        ({"schema": "{"}, "schema is not JSON"),
        ({"k": 0}, "k is 0; it must be from 1 to"),
        ({"k": 17}, "k is 17; it must be at most max_tries, which is 16"),
        ({"max_tries": 0}, "max_tries is 0; it must be from 1 to"),
        ({"min_tokens": -1}, "min_tokens is -1"),
    ],
)
def test_accept_config_names_a_field_out_of_range(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AcceptConfig(**fields)
