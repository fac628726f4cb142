"""Grammars of tool calls agree with the parsers of their formats."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from batchinfer.text.structured.compiled_grammar import GrammarCompiler, check_structured_outputs
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.text.tools.formats import FORMATS
from batchinfer.text.tools.row_tools import RowTools, checked_tools
from tests.text.reasoning.tokenizers import EOS, byte_tokenizer, encode
from tests.text.tools.test_formats import (
    ARGUMENTS,
    BOTH,
    STOP,
    STOP_CALL,
    TOOLS,
    V3,
    V31,
    WEATHER,
    WEATHER_CALL,
)

NAMED = {"type": "function", "function": {"name": "weather"}}
HERMES = "<tool_call>\n{}\n</tool_call>"
ODD_CITY = "Zürich\n</b>"
DEEP = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
TAGS = {
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n<parameter=days>\n"
        "{}\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=stop>\n<parameter=now>\n{}\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>days"
        "</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
        "<tool_call>stop\n<arg_key>now</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    ),
    "minimax_m2": (
        '<invoke name="weather">\n<parameter name="city">\n{}\n</parameter>\n'
        '<parameter name="days">\n{}\n</parameter>\n</invoke>\n',
        '<invoke name="stop">\n<parameter name="now">\n{}\n</parameter>\n</invoke>\n',
    ),
}
TWO_TAGS = {
    name: f"{weather.format(ODD_CITY, 2)}\n{stop.format('true')}"
    for name, (weather, stop) in TAGS.items()
}
ODD_CALLS = [("weather", {"city": ODD_CITY, "days": 2}), STOP_CALL]
KIMI = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_SIDES = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
THOUGHT = "<|channel|>analysis<|message|>hm {x<|end|><|start|>assistant"


GRAMMAR_CASES: dict[str, tuple[str, Any, str, list[Any]]] = {
    "hermes": ("hermes", "required", f"{HERMES.format(WEATHER)}\n{HERMES.format(STOP)}", BOTH),
    "hermes, one": ("hermes", NAMED, HERMES.format(WEATHER), [WEATHER_CALL]),
    "mistral": ("mistral", "required", f"[TOOL_CALLS][{WEATHER}, {STOP}]", BOTH),
    "llama": (
        "llama3_json",
        "required",
        f"{WEATHER}; {STOP}".replace('"arguments"', '"parameters"'),
        BOTH,
    ),
    "phi": ("phi4_mini_json", "required", f"functools[{WEATHER}, {STOP}]", BOTH),
    "qwen3 coder": ("qwen3_coder", "required", TWO_TAGS["qwen3_coder"], ODD_CALLS),
    "glm": ("glm45", "required", TWO_TAGS["glm45"], ODD_CALLS),
    "minimax": (
        *("minimax_m2", "required"),
        "<minimax:tool_call>\n"
        + TWO_TAGS["minimax_m2"].replace("</invoke>\n\n", "</invoke>\n")
        + "</minimax:tool_call>",
        ODD_CALLS,
    ),
    "pythonic": ("pythonic", "required", '[weather(city="Zürich", days=2), stop(now=true)]', BOTH),
    "olmo": (
        *("olmo3", "required"),
        '<function_calls>weather(city="Zürich", days=2)\nstop(now=true)</function_calls>',
        BOTH,
    ),
    "lfm": (
        "lfm2",
        "required",
        "<|tool_call_start|>[stop(now=true)]<|tool_call_end|>",
        [STOP_CALL],
    ),
    "deepseek v3": (
        *("deepseek_v3", "required"),
        DEEP[0]
        + V3.replace("{}", "weather", 1).replace("{}", ARGUMENTS[0])
        + "\n"
        + V3.replace("{}", "stop", 1).replace("{}", ARGUMENTS[1])
        + DEEP[1],
        BOTH,
    ),
    "deepseek v3.1": (
        *("deepseek_v31", NAMED),
        V31.format("weather", ARGUMENTS[0]).join(DEEP),
        [WEATHER_CALL],
    ),
    "kimi": (
        *("kimi_k2", "required"),
        "".join(
            KIMI.format(f"{name}:{at}", arguments)
            for at, (name, arguments) in enumerate(zip(["weather", "stop"], ARGUMENTS, strict=True))
        ).join(KIMI_SIDES),
        BOTH,
    ),
    "gpt-oss": (
        *("openai", NAMED),
        f"{THOUGHT}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{ARGUMENTS[0]}",
        [WEATHER_CALL],
    ),
}
HARMONY = [f"<|{name}|>" for name in ("start", "channel", "message", "end", "constrain")]


@pytest.mark.parametrize("case", GRAMMAR_CASES.values(), ids=GRAMMAR_CASES)
@pytest.mark.parametrize("are_special", [True, False], ids=["special", "added"])
def test_grammar_and_parser_of_a_format_agree(
    case: tuple[str, Any, str, list[Any]], are_special: bool
) -> None:
    name, choice, text, calls = case
    arguments = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</parameter>"]
    added = ["<tool_call>", "</tool_call>", *(arguments if are_special else [])]
    special = ["[TOOL_CALLS]", "<|tool_call|>", *HARMONY, *KIMI_SIDES]
    tokenizer = byte_tokenizer(
        added=[] if are_special else [*added, *arguments],
        special=[*special, *(added if are_special else [])],
    )
    found = FORMATS[name].parse(text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    grammar = RowTools(TOOLS, choice).grammar(FORMATS[name], tokenizer)
    assert grammar is not None
    assert follows(grammar, tokenizer, text)
    assert not follows(grammar, tokenizer, "Hello.")
    assert not follows(grammar, tokenizer, text.replace("stop", "weather", 1).replace("days", "x"))


def follows(grammar: str, tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a grammar allows each token of a text, and then the end."""
    (eos,) = encode(tokenizer, EOS).tolist()
    compiled = GrammarCompiler(tokenizer, frozenset({eos}), 320).compile({"grammar": grammar})
    state, forced = compiled.begin(), list[int]()
    for token_id in [*encode(tokenizer, text).tolist(), eos]:
        if forced:
            if token_id != forced.pop(0):
                return False
            continue
        (mask,) = compiled.masks([state])
        if not np.unpackbits(mask.view(np.uint8), bitorder="little")[token_id]:
            return False
        if token_id != eos:
            forced = state.take(token_id)
    assert state.error is None
    return True


@pytest.mark.parametrize(
    ("parameters", "takes_others"),
    [
        (None, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, True),
        ({"anyOf": [{"type": "object"}]}, True),
    ],
)
def test_grammar_allows_only_listed_arguments(
    parameters: dict[str, Any] | None, takes_others: bool
) -> None:
    function = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
    tokenizer = byte_tokenizer()
    tools = checked_tools([{"type": "function", "function": function}])
    grammar = RowTools(tools, "required").grammar(FORMATS["llama3_json"], tokenizer)
    assert grammar is not None
    assert follows(grammar, tokenizer, '{"name": "f", "parameters": {}}')
    others = '{"name": "f", "parameters": {"x": 1}}'
    assert follows(grammar, tokenizer, others) is takes_others


OPTIONAL = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}, "c": {"type": "string"}},
}


@pytest.mark.parametrize("required", [[], ["b"]])
@pytest.mark.parametrize("given", [[], ["a"], ["b"], ["c"], ["a", "b"], ["b", "c"], ["a", "c"]])
def test_grammar_of_optional_parameters(required: list[str], given: list[str]) -> None:
    parameters = {**OPTIONAL, "required": required}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    tokenizer = byte_tokenizer()
    values = {"a": '"x"', "b": "1", "c": '"z"'}
    python = f"[f({', '.join(f'{name}={values[name]}' for name in given)})]"
    tags = "".join(
        f"<arg_key>{name}</arg_key>\n<arg_value>{values[name].strip(chr(34))}</arg_value>\n"
        for name in given
    )
    is_whole = set(required) <= set(given)
    for name, text in (("pythonic", python), ("glm45", f"<tool_call>f\n{tags}</tool_call>")):
        grammar = RowTools(tools, "required").grammar(FORMATS[name], tokenizer)
        assert grammar is not None
        assert follows(grammar, tokenizer, text) is is_whole, text


def test_formats_that_need_listed_parameters_refuse_other_schemas() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"anyOf": [{}]}}}]
    with pytest.raises(ValueError, match=r'tool_choice "required" with this model.* not yet'):
        RowTools(tools, "required").grammar(FORMATS["pythonic"], byte_tokenizer())
    assert RowTools(tools, "required").grammar(FORMATS["kimi_k2"], byte_tokenizer()) is not None
    assert RowTools(tools).grammar(FORMATS["pythonic"], byte_tokenizer()) is None


def test_parameters_with_definitions() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"a": {"enum": ["b", "c"], "contains": 5}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = RowTools(tools, "required").grammar(FORMATS["llama3_json"], byte_tokenizer())
    assert grammar is not None
    check_structured_outputs({"grammar": grammar})
