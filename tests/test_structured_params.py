"""Structured outputs in calls: vLLM's classes, structural tags, grammars and defaults."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchinfer import LLM, GuidedDecodingParams, SamplingParams, StructuredOutputsParams

QUIET: dict[str, Any] = {"use_tqdm": False}


def run(llm: LLM, prompt: Any, params: SamplingParams) -> Any:
    return llm.generate(prompt, params, **QUIET)[0]


STRUCTURES = [
    ({"regex": "[ab]{3}"}, GuidedDecodingParams(regex="[ab]{3}", backend="xgrammar")),
    ({"json_object": True}, StructuredOutputsParams(json_object=True)),
    (
        {"json": {"type": "null"}, "disable_any_whitespace": True},
        StructuredOutputsParams(json='{"type": "null"}', disable_any_whitespace=True),
    ),
]


@pytest.mark.parametrize(("plain", "params"), STRUCTURES)
def test_structured_outputs_accept_vllm_classes(
    plain: dict[str, Any], params: StructuredOutputsParams
) -> None:
    expected = SamplingParams(structured_outputs=plain)
    assert SamplingParams(structured_outputs=params) == expected
    assert SamplingParams(guided_decoding=params) == expected


def test_aliases_of_structured_outputs_and_thinking_budget(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    closed = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    found = SamplingParams(structured_outputs=closed).structured_outputs or {}
    assert json.loads(found["json"]) == {**schema, "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    params = SamplingParams(response_format=wanted)
    assert params == SamplingParams(structured_outputs={"json": schema})
    with pytest.raises(ValueError, match="guided_decoding and structured_outputs mean the same"):
        SamplingParams(guided_decoding={"regex": "a"}, structured_outputs={"regex": "a"})
    with pytest.raises(ValueError, match="has no constraint; give exactly one of json, regex"):
        StructuredOutputsParams()
    with pytest.raises(ValueError, match="has regex and grammar; give exactly one"):
        GuidedDecodingParams(regex="a", grammar="b")
    assert GuidedDecodingParams.from_optional(regex=None) is None
    assert SamplingParams(thinking_token_budget=8) == SamplingParams(max_reasoning_tokens=8)
    assert SamplingParams(thinking_token_budget=-1) == SamplingParams()
    with pytest.raises(ValueError, match="thinking_token_budget and max_reasoning_tokens mean"):
        SamplingParams(thinking_token_budget=8, max_reasoning_tokens=8)
    with pytest.raises(ValueError, match=r"prompt 0: structured_outputs: .*false"):
        run(llm, "a", SamplingParams(structured_outputs={"json": False}))
    (output,) = llm.generate(
        "a", SamplingParams(structured_outputs={"json": False}), errors="return", **QUIET
    )
    assert (output.error.code, output.prompt) == ("invalid_structured_output", "a")


CLOSED = {
    "type": "object",
    "properties": {"n": {"enum": [7]}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("[", "structural_tag is not JSON"),
        ({"type": "x"}, "it must be an object whose type is structural_tag"),
    ],
)
def test_invalid_structural_tags_are_refused(tag: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=tag))


def test_unsupported_formats_are_refused_by_the_call(llm: LLM) -> None:
    tag = {"type": "structural_tag", "format": {"type": "token", "token": 3}}
    as_response_format = SamplingParams(response_format=tag)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=tag))
    assert as_response_format.structured_outputs == params.structured_outputs
    with pytest.raises(
        ValueError, match=r"prompt 0: .*format has the format \"token\", which is not"
    ):
        run(llm, "a", params)


def test_samples_follow_a_structural_tag(llm: LLM) -> None:
    content = {"type": "json_schema", "json_schema": CLOSED}
    form = {
        "type": "triggered_tags",
        "tags": [{"begin": "<f=a>", "content": content, "end": "</f>"}],
        "triggers": ["<f="],
        "at_least_one": True,
        "stop_after_first": True,
    }
    tag = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    params = SamplingParams(structured_outputs=tag, max_tokens=128, seed=1)
    assert re.fullmatch(r'<f=a>\{\s*"n"\s*:\s*7\s*\}</f>', run(llm, "a", params).outputs[0].text)


def test_gbnf_grammar(llm: LLM) -> None:
    grammar = 'root ::= "SELECT " column " FROM t" # what\ncolumn ::= "a" | "b"'
    params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar))
    text = run(llm, "a", replace(params, max_tokens=64)).outputs[0].text
    assert text in ("SELECT a FROM t", "SELECT b FROM t")
    with pytest.raises(ValueError, match="Failed to convert the grammar"):
        run(llm, "a", SamplingParams(structured_outputs={"grammar": "not a grammar"}))


def test_outlines_backend_uses_its_json_whitespace(model: Path) -> None:
    llm = LLM(model, num_kv_blocks=64, structured_outputs_config={"backend": "outlines"})
    schema = {"type": "object", "properties": {"a": {"enum": [[1, 2]]}}, "required": ["a"]}
    params = SamplingParams(
        n=16, seed=1, max_tokens=64, structured_outputs={"json": schema, "unsupported": "check"}
    )
    texts = {sample.text for sample in run(llm, "a", params).outputs}
    assert all(json.loads(text)["a"] == [1, 2] for text in texts)
    assert any(" " in text for text in texts)
    assert not any("\n" in text or "  " in text for text in texts)


def test_llm_schema_defaults_apply_to_calls(model: Path) -> None:
    wanted = ("disable_any_whitespace", "disable_additional_properties")
    config = SimpleNamespace(backend="xgrammar", **dict.fromkeys(wanted, True))
    with pytest.warns(UserWarning, match="structured_outputs_backend has no effect"):
        llm = LLM(model, num_kv_blocks=32, structured_outputs_config=config)
    objects = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    params = SamplingParams(structured_outputs={"json": objects}, max_tokens=32)
    for seed in range(4):
        assert run(llm, "a", replace(params, seed=seed)).outputs[0].text == '{"a":null}'
