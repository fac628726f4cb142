"""Compiled grammars: which tokens they allow and force, and which grammars are refused."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

import jsonschema
import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.config import SamplingParams
from batchinfer.config.regex import has_match
from batchinfer.text.structured import compiled_grammar
from batchinfer.text.structured.compiled_grammar import (
    CompiledGrammar,
    GrammarCompiler,
    check_structured_outputs,
)
from batchinfer.text.structured.grammar_source import GrammarError
from batchinfer.text.structured.json_schema import exact_schema
from batchinfer.text.tokenizer import Tokenizer
from tests.job.fakes import byte_tokenizer
from tests.text.bad_grammars import BAD
from tests.text.schemas import SCHEMAS

BYTES = GrammarCompiler(byte_tokenizer(), frozenset({0}), 257)


def asked(**structured_outputs: Any) -> Mapping[str, Any]:
    """Return structured outputs as ``SamplingParams`` stores them."""
    value = SamplingParams(structured_outputs=structured_outputs).structured_outputs
    assert value is not None
    return value


def allowed(grammar: CompiledGrammar, state: Any) -> list[int]:
    (mask,) = grammar.masks([state])
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def text_of(
    grammar: CompiledGrammar, tokenizer: Tokenizer, eos: int, seed: int, most: int = 400
) -> str | None:
    """Return a text of random tokens that the grammar allows, or None if it does not end."""
    random, state, ids = np.random.default_rng(seed), grammar.begin(), list[int]()
    while len(ids) < most:
        ids.append(int(random.choice(allowed(grammar, state))))
        if ids[-1] != eos:
            ids += state.take(ids[-1])
        assert state.error is None
        if ids[-1] == eos:
            return tokenizer.decode(ids[:-1], skip_special_tokens=False)
    return None


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=False, parse_special_tokens=False)
    return ids.tolist()


def accepts(grammar: CompiledGrammar, tokenizer: Tokenizer, eos: int, text: str) -> bool:
    """Return True if the grammar allows the text, token by token."""
    state, forced = grammar.begin(), list[int]()
    for token in [*ids_of(tokenizer, text), eos]:
        if forced:
            if forced.pop(0) != token:
                return False
        elif token not in allowed(grammar, state):
            return False
        elif token != eos:
            forced = state.take(token)
    return not forced


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_sampled_with_a_grammar_are_valid(name: str) -> None:
    grammar = BYTES.compile(asked(json=SCHEMAS[name]))
    texts = [text_of(grammar, byte_tokenizer(), 0, seed) for seed in range(12)]
    ended = [json.loads(text) for text in texts if text is not None]
    assert ended
    for value in ended:
        jsonschema.validate(value, SCHEMAS[name])


def test_grammars_compile_for_real_tokenizers(tokenizer: Tokenizer) -> None:
    eos = 2 if tokenizer.special_tokens["eos_token"] in ("<|im_end|>", "</s>") else 0
    compiler = GrammarCompiler(tokenizer, frozenset({eos}), tokenizer.vocab_size + 40)
    pattern = r"[A-Z][a-z]{2,5} (é|東京|🙂), \d{2}"
    for seed in range(10):
        text = text_of(compiler.compile(asked(regex=pattern)), tokenizer, eos, seed)
        assert text is not None
        assert re.fullmatch(pattern, text)
        schema = SCHEMAS["nested"]
        text = text_of(compiler.compile(asked(json=schema)), tokenizer, eos, seed)
        assert text is not None
        jsonschema.validate(json.loads(text), schema)


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=5))
def test_choices_are_taken_literally(choices: list[str]) -> None:
    grammar = BYTES.compile(asked(choice=choices))
    for text in choices:
        assert accepts(grammar, byte_tokenizer(), 0, text)
    assert text_of(grammar, byte_tokenizer(), 0, len(choices)) in choices


PATTERNS = [r"\d{3}", r"[\d\s]{4}", r"\s\S", r"\w\W", r"[^\s]{2}", r"[^\S]", r"[^\D]", r"[]\d]x\\d"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_for_a_pattern_match_it_in_other_regex_engines(pattern: str) -> None:
    """``accept.regex`` uses RE2; the patterns of schemas are ECMAScript's."""
    whole = f"^(?:{pattern})$"
    schema = {"type": "string", "pattern": whole}
    ecma = jsonschema_rs.validator_for(schema)
    of_text, of_json = BYTES.compile(asked(regex=pattern)), BYTES.compile(asked(json=schema))
    for seed in range(60):
        text = text_of(of_text, byte_tokenizer(), 0, seed)
        assert text is not None
        assert has_match(f"(?s){whole}", text)
        assert ecma.is_valid(text)
        value = text_of(of_json, byte_tokenizer(), 0, seed)
        assert value is not None
        assert has_match(f"(?s){whole}", json.loads(value))
        assert ecma.is_valid(json.loads(value))


def test_classes_are_spelled_out_in_patterns_only() -> None:
    values = {"const": {"pattern": r"\d"}, "enum": [{"pattern": r"\s"}]}
    schema = {
        "properties": {"pattern": {"patternProperties": {r"^\d": {"pattern": "a"}}}},
        **values,
    }
    spelled = {"properties": {"pattern": {"patternProperties": {"^[0-9]": {"pattern": "a"}}}}}
    assert exact_schema(schema) == spelled | values


@pytest.mark.parametrize(
    "name", ["const", "enum", "default", "examples", "pattern", "patternProperties", "properties"]
)
@pytest.mark.parametrize("key", ["properties", "$defs", "definitions", "dependentSchemas"])
def test_a_property_may_have_the_name_of_a_key_of_schemas(key: str, name: str) -> None:
    spelled = {key: {name: {"pattern": "[0-9]"}}}
    assert exact_schema({key: {name: {"pattern": r"\d"}}}) == spelled


def test_lark_grammar_may_be_recursive() -> None:
    grammar = BYTES.compile(asked(grammar='start: "(" start ")" | "x"'))
    assert accepts(grammar, byte_tokenizer(), 0, "((x))")
    assert not accepts(grammar, byte_tokenizer(), 0, "((x)")


@pytest.mark.parametrize(
    ("options", "compact", "spaced", "endless"),
    [
        ({}, True, True, False),
        ({"disable_any_whitespace": True}, True, False, False),
        ({"whitespace_pattern": " *"}, True, True, True),
    ],
)
def test_whitespace(options: dict[str, Any], compact: bool, spaced: bool, endless: bool) -> None:
    grammar = BYTES.compile(asked(json={"type": "array", "items": {"type": "null"}}, **options))
    texts = ("[null,null]", "[null, null]", "[null,      null]")
    found = tuple(accepts(grammar, byte_tokenizer(), 0, text) for text in texts)
    assert found == (compact, spaced, endless)


def test_an_indent_is_allowed() -> None:
    grammar = BYTES.compile(asked(json_object=True))
    text = json.dumps({"a": [{"b": [1, 2]}, {}], "c": None}, indent=4)
    assert accepts(grammar, byte_tokenizer(), 0, text)


def test_take_returns_forced_tokens() -> None:
    grammar = BYTES.compile(asked(choice=["yes", "no"]))
    state = grammar.begin()
    first, *others = ids_of(byte_tokenizer(), "yes")
    assert state.take(first) == [*others, 0]


def test_end_token_is_allowed_only_after_a_complete_text() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), frozenset({0, 256}), 300)
    grammar = compiler.compile(asked(regex="a+"))
    state = grammar.begin()
    (a,) = allowed(grammar, state)
    assert state.take(a) == []
    assert allowed(grammar, state) == sorted([0, a, 256])
    assert grammar.masks([state]).shape == (1, -(-300 // 32))


def test_forked_grammar_states_are_independent() -> None:
    grammar, other = BYTES.compile(asked(regex="ab|cd")), BYTES.compile(asked(regex="x+"))
    states = [grammar.begin(), grammar.begin(), other.begin()]
    first = allowed(grammar, states[0])
    states[1].take(first[0])
    assert allowed(grammar, states[0]) == first
    masks = grammar.masks(states)
    assert (masks[0] == grammar.masks([states[0]])[0]).all()
    assert (masks[2] == other.masks([states[2]])[0]).all()


@pytest.mark.parametrize("name", BAD)
def test_grammar_compile_error_is_one_line(name: str) -> None:
    began = time.process_time()
    for compile_it in (check_structured_outputs, BYTES.compile):
        with pytest.raises(ValueError, match=r".") as caught:
            compile_it(asked(**BAD[name]))
        assert "\n" not in str(caught.value)
        assert "<state>" not in str(caught.value)
    assert time.process_time() - began < 120  # without limits it would take hours


def test_grammar_work_per_step_is_bounded() -> None:
    grammar = BYTES.compile(asked(regex="[ab]{9}(a{1000}){1000}"))
    state = grammar.begin()
    for _ in range(9):
        assert state.error is None
        state.take(allowed(grammar, state)[0])
    assert state.error == "lexer error: too many expressions constructed"


def test_llguidance_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"pip install '\.\[structured\]'"):
        check_structured_outputs(asked(regex="a"))
    with pytest.raises(GrammarError, match=r"pip install '\.\[structured\]'"):
        GrammarCompiler(byte_tokenizer(), frozenset({0}), 257).compile(asked(regex="a"))


@pytest.mark.parametrize("cores", [1, 64])
def test_token_masks_do_not_depend_on_the_number_of_cores(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchinfer.text.structured.masks.available_cpus", lambda: cores)
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, frozenset({0}), 257)
    grammar = compiler.compile(asked(choice=["av", "aw", "cx", "cz"]))
    states = [grammar.begin() for _ in range(3)]
    for state, text in zip(states[1:], "ac", strict=True):
        state.take(ids_of(tokenizer, text)[0])
    masks = grammar.masks(states).view(np.uint8)
    tokens = [np.flatnonzero(np.unpackbits(mask, bitorder="little")) for mask in masks]
    texts = [tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in tokens]
    assert texts == ["ac", "vw", "xz"]


def test_a_grammar_is_compiled_again_after_a_panic(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compiled() -> Any:
        made.append(
            GrammarCompiler(byte_tokenizer(), frozenset({0}), 257).compile(asked(regex="a"))
        )
        return made[-1].beginning

    grammar = CompiledGrammar(compiled, 0, BYTES.masks)
    states = [grammar.begin(), grammar.begin()]
    assert [state.error for state in states] == [None, None]
    with monkeypatch.context() as patch:
        patch.setattr(compiled_grammar, "_error_of", lambda matcher: "panic: it failed")
        assert [state.error for state in states] == ["panic: it failed"] * 2
    assert grammar.begin().error is None
    assert grammar.beginning is made[1].beginning
    assert len(made) == 2


def test_a_sample_goes_on_after_the_panic_of_another_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, frozenset({0}), 257)
    grammar, text = compiler.compile(asked(regex="[ab]+!cd")), ids_of(tokenizer, "abab!")
    expected, state = grammar.begin(), grammar.begin()
    for token_id in text[:-1]:
        expected.take(token_id)
        state.take(token_id)
    state.matcher.consume_token(ids_of(tokenizer, "x")[0])  # any error
    assert state.error is not None
    monkeypatch.setattr(compiled_grammar, "_PANIC", " ")
    monkeypatch.setattr(compiled_grammar, "_POISONED", " ")
    assert allowed(grammar, state) == allowed(grammar, expected)
    state.matcher.consume_token(ids_of(tokenizer, "x")[0])
    assert state.take(text[-1]) == expected.take(text[-1])
    assert state.error is None
