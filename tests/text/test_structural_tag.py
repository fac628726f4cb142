"""Structural tags, as grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.text.structured.compiled_grammar import _byte_tokenizer, check_structured_outputs
from batchinfer.text.structured.grammar_source import GrammarError
from batchinfer.text.structured.structural_tag import structural_lark

pytest.importorskip("llguidance")
from llguidance import LLMatcher

SCHEMA = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
TAGS = [
    {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"},
    {"begin": "<f=b>", "content": {"type": "any_text"}, "end": "</f>"},
]
TRIGGERED = {"type": "triggered_tags", "tags": TAGS, "triggers": ["<f="]}
ANY = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def in_order(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": [*elements]}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def matcher_of(structural_tag: dict[str, Any]) -> LLMatcher:
    lark = structural_lark(json.dumps({"type": "structural_tag", **structural_tag}), " ?")
    matcher = LLMatcher(_byte_tokenizer(), LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def check(structural_tag: dict[str, Any], valid: list[str], invalid: list[str]) -> None:
    beginning = matcher_of(structural_tag)
    for texts, fits in ((valid, True), (invalid, False)):
        for text in texts:
            matcher, ids = beginning.deep_copy(), list(text.encode())
            taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert taken == fits, text


JSON = {"type": "json_schema", "json_schema": SCHEMA}
SHORT = {**ANY, "max_chars": 5}
AB = 'root ::= "ab"'
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age"],
}

CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "triggered tags": (
        TRIGGERED,
        ["", "< f", 'x<f=b>any < text</f>y<f=a>{"n":7}</f>'],
        ["<f=c>", "<f=a>{}"],
    ),
    "one triggered tag, at once": (
        {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
        ["<f=b>y</f>"],
        ["", "free text", "x<f=b>y</f>", "<f=b>y</f>z"],
    ),
    "triggered tags, the first at once": (
        {**TRIGGERED, "at_least_one": True},
        ['<f=b>y</f>z<f=a>{"n": 7}</f>'],
        ["", "x<f=b>y</f>"],
    ),
    "at most one triggered tag": (
        {**TRIGGERED, "stop_after_first": True, "excludes": ["bad"]},
        ["", "text", "x<f=b>y</f>"],
        ["x<f=b>y</f>z", "bad", "bad<f=b>y</f>"],
    ),
    "triggered tags in a tag": (
        tag("<r>", {**TRIGGERED, "tags": TAGS[1:]}, "</r>"),
        ["<r></r>", "<r>a<f=b>b</f>c</r>"],
        ["<r>a", "<r>a</r>b", "<r><f=c></r>"],
    ),
    "reasoning, then tags": (
        in_order(tag("<think>", ANY, "</think>"), TRIGGERED),
        ["<think>a<f=c></think>b", "<think></think>"],
        ["a", "<think>a", "<think></think><f=c>"],
    ),
    "constant": (const("yes"), ["yes"], ["no", "yes!"]),
    "alternatives": (
        either(const("a"), {"type": "json_schema", "json_schema": SCHEMA}, in_order(const("ab"))),
        ["a", "ab", '{"n":7}'],
        ["b", "abc", ""],
    ),
    "a regex before a constant that it matches, too": (
        in_order({"type": "regex", "pattern": r"[a-z/]+\d"}, const("end")),
        ["a/1end", "end2end"],
        ["a1", "1end"],
    ),
    "an empty regex": (in_order(const("a"), regex(""), const("b")), ["ab"], ["a", "a//b"]),
    "a regex with slashes, a backslash and a line break": (
        in_order(regex("a/\\\\/x\\/\n\\\n"), const("b")),
        ["a/\\/x/\n\nb"],
        ["a/\\/x/\n\n", "a//x/\n\nb"],
    ),
    "a regex before a tag": (
        in_order(regex("[a-z<>]*"), tag("<t>", JSON, "</t>")),
        ['ab<t>{"n":7}</t>', '<t>{"n":7}</t>', '<><t>{"n":7}</t>'],
        ['a1<t>{"n":7}</t>', '{"n":7}'],
    ),
    "short text before a tag": (
        in_order(SHORT, tag("<t>", JSON, "</t>")),
        ['ab<t>{"n":7}</t>', '<t>{"n":7}</t>', 'a<b<c<t>{"n":7}</t>'],
        ['abcdef<t>{"n":7}</t>', 'a{"n":7}'],
    ),
    "short text before nested constants": (
        in_order(in_order(SHORT, in_order(const("<"), const("t>"))), JSON),
        ['a<t>{"n":7}', 'a<<t>{"n":7}'],
        ['a<{"n":7}', 'abcdef<t>{"n":7}'],
    ),
    "a regex in tags in free text": (
        {**TRIGGERED, "tags": [{**TAGS[0], "content": regex("[a-z</=>]+")}, TAGS[1]]},
        ["x<f=a>y</f>z<f=a>y</f>", "<f=b>1</f>2"],
        ["<f=a>1</f>", "<f=a></f>"],
    ),
    "a regex or JSON before a constant": (
        in_order(either(regex("[a-z]+"), JSON), const("end")),
        ["abend", '{"n":7}end'],
        ["ab", "end", '{"n":7}'],
    ),
    "repeated constants before a grammar": (
        in_order({"type": "plus", "content": const("a")}, {"type": "grammar", "grammar": AB}),
        ["aab", "aaab"],
        ["ab", "aa"],
    ),
    "free text before a tag": (
        in_order(ANY, tag("<t>", JSON, "</t>")),
        ['a<b<t>{"n":7}</t>'],
        ['a{"n":7}', "a<t>", '<t>b<t>{"n":7}</t>'],
    ),
    "a trigger that begins with another": (
        {
            "type": "triggered_tags",
            "triggers": ["<function=", "<f"],
            "tags": [tag("<function=a>", const("1"), "</>"), tag("<foo>", const("2"), "</>")],
        },
        ["<function=a>1</>", "x<foo>2</>y<function=a>1</>"],
        ["<function=a>2</>", "<f", "<foo>1</>"],
    ),
    "several ends": (tag("<", ANY, ["</a>", "</b>"]), ["<x</b>", "<</a>"], ["<x", "<x</b></a>"]),
    "an open end": (in_order(tag("a", ANY, ""), const("z")), ["az", "abz"], ["a", "azz"]),
    "text up to a constant": (in_order(ANY, const("."), const("!")), ["a.!"], ["a.", "a.b.!"]),
    "text without words": ({**ANY, "excludes": ["bad", "no"]}, ["", "n o"], ["abad", "no"]),
    "short text": (tag("<", {**ANY, "max_chars": 2}, ">"), ["<>", "<ä>", "<ab>"], ["<abc>"]),
    "short text with an optional end": (
        tag("<", {**ANY, "max_chars": 2}, ["", ">"]),
        ["<", "<ab", "<ab>"],
        ["<abc", "<ab>>"],
    ),
    "an optional part": (
        in_order({"type": "optional", "content": const("a")}, const("b")),
        ["ab", "b"],
        ["aab"],
    ),
    "an optional end": (
        in_order(const("a"), {"type": "optional", "content": ANY}),
        ["a", "ab"],
        [],
    ),
    "repetitions": (
        in_order(
            {"type": "plus", "content": const("a")},
            {"type": "star", "content": const("b")},
            {"type": "repeat", "min": 1, "max": 2, "content": const("c")},
            {"type": "repeat", "min": 0, "max": 0, "content": const("e")},
            {"type": "repeat", "min": 1, "max": -1, "content": const("d")},
        ),
        ["acd", "aabbccddd"],
        ["cd", "ad", "acccd", "ac", "aced"],
    ),
    "repeated JSON": (
        {"type": "repeat", "min": 2, "max": 2, "content": TAGS[0] | {"type": "tag"}},
        ['<f=a>{"n":7}</f><f=a>{"n":7}</f>'],
        ['<f=a>{"n":7}</f>'],
    ),
    "tags with separators": (
        {"type": "tags_with_separator", "tags": TAGS, "separator": ", "},
        ["", "<f=b>x</f>", '<f=b>x</f>, <f=a>{"n":7}</f>'],
        ["<f=b>x</f>, ", "<f=b>x</f><f=b>x</f>"],
    ),
    "one tag": (
        {
            "type": "tags_with_separator",
            "tags": TAGS,
            "separator": ",",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<f=b>x</f>"],
        ["", "<f=b>x</f>,<f=b>x</f>"],
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["<a>", const("1")], ["<b>", const("2")]]},
        ["", "x<a>1y<b>2z", "< a >"],
        ["<a>2", "<b>"],
    ),
    "dispatch of one": (
        {"type": "dispatch", "rules": [["<a>", const("1")]], "loop": False},
        ["", "x<a>1", "x"],
        ["x<a>1y", "<a>"],
    ),
    "GBNF": (
        in_order(
            {"type": "grammar", "grammar": 'root ::= "{" b+ "}"\nb ::= "x" | [y]'},
            {"type": "grammar", "grammar": 'root ::= b\nb ::= "z"'},
        ),
        ["{xy}z"],
        ["{}z", "{x}", "{x}x"],
    ),
    "Qwen's parameters": (
        tag("<f>", {"type": "qwen_xml_parameter", "json_schema": PERSON}, "</f>"),
        [
            "<f><parameter=name>A\nB</parameter>\n<parameter=age>\n3\n</parameter></f>",
            "<f><parameter=name></parameter><parameter=age>3</parameter>"
            "<parameter=kind>b</parameter></f>",
        ],
        [
            "<f><parameter=age>3</parameter></f>",
            "<f><parameter=name>A</parameter><parameter=age>x</parameter></f>",
            "<f><parameter=name>A</parameter><parameter=age>3</parameter><parameter=kind>c",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_formats_match_their_texts(case: str) -> None:
    form, valid, invalid = CASES[case]
    check({"format": form}, valid, invalid)


def test_the_earlier_form_of_triggered_tags() -> None:
    structures = [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}]
    check(
        {"structures": structures, "triggers": ["<f="]},
        ["free text", 'so <f=a>{"n":7}</f> and <f=a>{"n": 7}</f>.'],
        ["<f=b>", '<f=a>{"n":8}', "<f=a>x"],
    )


def test_the_style_of_a_schema_names_qwen_xml() -> None:
    form = {"type": "json_schema", "json_schema": PERSON, "style": "qwen_xml"}
    text = "<parameter=name>A</parameter><parameter=age>3</parameter>"
    check({"format": form}, [text], ["{}"])


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (None, "format is null; it must be a format"),
        (
            {"type": "any_tokens"},
            'format has the format "any_tokens", which is not supported; known',
        ),
        ({**ANY, "max_tokens": 3}, 'has the key "max_tokens", which is not supported; known: type'),
        (in_order(const("a"), {**ANY, "exclude": []}), r"format.elements\[1\] .*did you mean excl"),
        (in_order(ANY, TRIGGERED), r"format.elements\[0\] has no end: put it into a tag"),
        ({"type": "star", "content": ANY}, "format.content has no end"),
        ({**TRIGGERED, "triggers": ["<g"]}, r"tags\[0\] has begin: .* start with a trigger"),
        ({**TRIGGERED, "tags": []}, r"has the tags \[\]; it must be a list with at least one"),
        (tag("a", ANY, ["", "b"]), "has endless content, but its end may be empty"),
        (tag({"type": "token", "token": 1}, ANY, "b"), "has the begin .* it must be a text"),
        (tag("a", ANY, 1), "has the end 1; it must be a text, or a list of texts"),
        ({"type": "json_schema", "json_schema": PERSON, "style": "glm_xml"}, 'style "glm_xml"'),
        ({"type": "json_schema", "json_schema": False}, "it must be a schema that allows a text"),
        ({"type": "json_schema", "json_schema": {"const": 2**70}}, "which no grammar enforces"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "Unimplemented keys"),
        ({"type": "qwen_xml_parameter", "json_schema": {"anyOf": []}}, "does not list the prop"),
        ({"type": "grammar", "grammar": "root ::= x"}, "not valid GBNF: line 1: the rule x is not"),
        ({"type": "regex", "pattern": "["}, "a regular expression is not valid"),
        ({"type": "repeat", "min": 3, "max": 2, "content": const("a")}, "max: 2, which is below"),
        ({"type": "plus"}, "format has no content; it must be a format"),
        (
            {"type": ["plus"]},
            r'format has the format \["plus"\], which is not supported; known: const',
        ),
        (in_order(SHORT, JSON), r"format.elements\[0\] has no clear end, because what follows"),
        (
            in_order(const("a"), regex("a+"), {"type": "grammar", "grammar": AB}),
            r"elements\[1\] has",
        ),
        (in_order({"type": "star", "content": SHORT}, JSON), r"elements\[0\].content has no clear"),
        (in_order(either(SHORT, JSON), JSON), r"elements\[0\].elements\[0\] has no clear end"),
        (
            {"type": "star", "content": in_order(JSON, regex("a*"))},
            r"content.elements\[1\] has no clear end",
        ),
        (
            {"type": "dispatch", "rules": [["<f=", const("1")], ["<f", const("2")]]},
            'has the texts "<f" and "<f="; none may contain another',
        ),
        ({"type": "dispatch", "rules": [["a"]]}, r"it must be a list of \[text, format\]"),
    ],
)
def test_other_formats_are_refused(form: Any, message: str) -> None:
    text = json.dumps({"type": "structural_tag", "format": form})
    with pytest.raises(GrammarError, match=message):
        check_structured_outputs({"structural_tag": text})


def test_a_tag_that_is_nested_too_deeply_is_refused() -> None:
    inner = '{"type": "const_string", "value": "a"}'
    form = '{"type": "sequence", "elements": [' * 900 + inner + "]}" * 900
    with pytest.raises(GrammarError, match="nested too deeply"):
        check_structured_outputs({"structural_tag": f'{{"format": {form}}}'})


def test_a_constant_may_hold_the_character_del() -> None:
    check({"format": const("a\x7f")}, ["a\x7f"], ["a"])
