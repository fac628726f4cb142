"""Tool calls are parsed in every format, and chat templates name their format."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from batchinfer.errors import RowError, UsageError
from batchinfer.text.tools.formats import FORMATS, find_tool_format
from batchinfer.text.tools.row_tools import RowTools, checked_tools, row_tools
from batchinfer.text.tools.tool_format import ToolCall, calls_in, fields_between
from tests.text.reasoning.tokenizers import byte_tokenizer


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("weather", city={"type": "string"}, days={"type": "integer"}),
    tool("stop", now={"type": "boolean"}),
]
WEATHER = '{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}'
STOP = '{"name": "stop", "arguments": {"now": true}}'
WEATHER_CALL = ("weather", {"city": "Zürich", "days": 2})
STOP_CALL = ("stop", {"now": True})
BOTH = [WEATHER_CALL, STOP_CALL]


@dataclass(frozen=True)
class Case:
    format: str
    text: str
    calls: list[tuple[str, Any]] = field(default_factory=lambda: BOTH)
    content: str = ""


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"  # noqa: RUF001
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"  # noqa: RUF001
ARGUMENTS = ('{"city": "Zürich", "days": 2}', '{"now": true}')

CASES = {
    "hermes": Case(
        "hermes",
        f"I look.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{STOP}\n</tool_call>",
        content="I look.",
    ),
    "hermes, the end cut off by a stop string": Case(
        "hermes", f"<tool_call>{STOP}", calls=[STOP_CALL]
    ),
    "hermes, no arguments": Case(
        "hermes", '<tool_call>{"name": "stop"}</tool_call>', calls=[("stop", {})]
    ),
    "qwen3 coder": Case(
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>"
        "\n<parameter=now>\nTrue\n</parameter>\n</function>\n</tool_call>",
        content="I look.",
    ),
    "qwen3 coder, text that looks like a number": Case(
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>8000</parameter></function></tool_call>",
        calls=[("weather", {"city": "8000"})],
    ),
    "hermes, markers in an argument": Case(
        "hermes",
        '<tool_call>{"name": "stop", "arguments": {"now": "</tool_call><tool_call>"}}</tool_call>',
        calls=[("stop", {"now": "</tool_call><tool_call>"})],
    ),
    "qwen3 coder, its own end left out": Case(
        "qwen3_coder",
        "<tool_call><function=stop><parameter=now>true</parameter></tool_call>",
        calls=[STOP_CALL],
    ),
    "minimax": Case(
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich'
        '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="stop">\n'
        '<parameter name="now">true</parameter>\n</invoke>\n</minimax:tool_call>',
        content="I look.",
    ),
    "glm 4.5": Case(
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        "<tool_call>stop\n<arg_key>now</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    ),
    "mistral": Case("mistral", f"I look.[TOOL_CALLS] [{WEATHER}, {STOP}]", content="I look."),
    "mistral 11": Case(
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS[0]}[TOOL_CALLS]stop[CALL_ID]a1[ARGS]{ARGUMENTS[1]}",
    ),
    "llama 3": Case(
        "llama3_json", f"<|python_tag|>{WEATHER}; {STOP}".replace('"arguments"', '"parameters"')
    ),
    "llama 3, bare": Case("llama3_json", f"\n{STOP}", calls=[STOP_CALL]),
    "pythonic": Case("pythonic", "[weather(city='Zürich', days=2), stop(now=True)]"),
    "pythonic, JSON's words": Case(
        "pythonic",
        r'[stop(now=true, why=[null, "\ud83d\ude00", "a\/b"], at=-1)]',
        calls=[("stop", {"now": True, "why": [None, "😀", r"a\/b"], "at": -1})],
    ),
    "llama 4": Case(
        "pythonic",
        'I look.<|python_start|>[weather(city="Zürich", days=2), stop(now=True)]<|python_end|>',
        content="I look.",
    ),
    "olmo 3": Case(
        "olmo3",
        'I look.<function_calls>\nweather(city="Zürich", days=2)\n\nstop(now=true)\n'
        "</function_calls>",
        content="I look.",
    ),
    "lfm 2": Case(
        "lfm2",
        '<|tool_call_start|>[weather(city="Zürich", days=2), stop(now=True)]<|tool_call_end|>Now.',
    ),
    "kimi k2": Case(
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS[0]}<|tool_call_end|><|tool_call_begin|>functions."
        f"stop:1<|tool_call_argument_begin|>{ARGUMENTS[1]}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        content="I look.",
    ),
    "granite": Case("granite", f"<|tool_call|>[{WEATHER}, {STOP}]"),
    "phi 4 mini": Case("phi4_mini_json", f"functools[{WEATHER}, {STOP}]"),
    "deepseek v3": Case(
        "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜>"  # noqa: RUF001
        + V3.replace("{}", "weather", 1).replace("{}", ARGUMENTS[0])
        + V3.replace("{}", "stop", 1).replace("{}", ARGUMENTS[1]),
        content="I look.",
    ),
    "deepseek v3.1": Case(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>"  # noqa: RUF001
        + V31.format("weather", ARGUMENTS[0])
        + V31.format("stop", ARGUMENTS[1]),
    ),
    "gpt-oss": Case(
        "openai",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{ARGUMENTS[0]}<|call|><|start|>assistant to=functions.stop"
        f"<|channel|>commentary<|message|>{ARGUMENTS[1]}",
        content="I look.",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tool_calls_are_parsed(case: Case) -> None:
    found = FORMATS[case.format].parse(case.text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == case.calls
    assert found.content == case.content


MALFORMED = {
    "hermes": ['<tool_call>{"name": "stop", </tool_call>', "<tool_call>[1]</tool_call>"],
    "qwen3_coder": [
        "<tool_call></tool_call>",
        "<tool_call><function=weather><parameter=city>Zür",
        "<tool_call><function=stop>",
    ],
    "seed_oss": ["<seed:tool_call><function=weather>\n<parameter=city>Zür"],
    "minimax_m2": ['<minimax:tool_call><invoke name="weather"><parameter name="city">Zür'],
    "glm45": ["<tool_call></tool_call>", "<tool_call>weath", "<tool_call>weather\n<arg_key>ci"],
    "mistral": ["[TOOL_CALLS][{]", "[TOOL_CALLS]weather", "[TOOL_CALLS]5", "[TOOL_CALLS]"],
    "llama3_json": ['{"city": "Z"}', "{", '{"name": 5, "parameters": {}}', "5"],
    "pythonic": ["[weather('Z')]", "[f(x=open('y'))]", "[]", "f(", "[1]", "[f(**{})]"],
    "olmo3": ["<function_calls>\nf(\n</function_calls>", "<function_calls></function_calls>"],
    "lfm2": ["<|tool_call_start|>[f(x"],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"
        "<|tool_call_end|>"
    ],
    "granite": ["<|tool_call|>{}", "<|tool_call|>["],
    "phi4_mini_json": ["functools[5]"],
    "deepseek_v3": [V31.format("weather", "{")],
    "deepseek_v31": [V31.format("", "{}")],
    "openai": ["<|channel|>commentary to=functions.f<|message|>{<|call|>"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_malformed_tool_calls_stay_text(name: str) -> None:
    for text in ["", "Hello.", "[", *MALFORMED[name]]:
        assert FORMATS[name].parse(text, TOOLS) is None, text


@pytest.mark.parametrize(
    "value",
    [r'"\ud800"', "NaN", "1e999", "1" * 5000, "[" * 100_000 + "]" * 100_000],
    ids=["surrogate", "nan", "infinity", "digits", "depth"],
)
def test_tool_calls_with_invalid_json_stay_text(value: str) -> None:
    text = f'<tool_call>{{"name": "stop", "arguments": {{"now": {value}}}}}</tool_call>'
    assert calls_in(text, FORMATS["hermes"], TOOLS) is None
    assert calls_in(text.replace(value, "1"), FORMATS["hermes"], TOOLS) is not None


def test_repeated_markers_take_linear_time() -> None:
    """A parser that started again at each marker would take hours."""
    for markers in (("<a>", "<b>", "<c>"), ("<a>", "<b>")):
        assert list(fields_between("<a>" * 500_000, *markers)) == []
    assert list(fields_between("<a>1<b>2<c>-<a><b><c><a>3<b>", "<a>", "<b>", "<c>")) == [
        ["1", "2"],
        ["", ""],
    ]
    looped = "<tool_call>f" + "<arg_key>a</arg_key>" * 100_000 + "</tool_call>"
    assert calls_in(looped, FORMATS["glm45"], TOOLS) is not None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_truncated_tool_calls_are_valid_or_stay_text(case: Case) -> None:
    """``max_tokens`` may end the text anywhere."""
    for end in range(len(case.text)):
        found = FORMATS[case.format].parse(case.text[:end], TOOLS)
        for call in () if found is None else found.calls:
            assert call.name
            assert isinstance(json.loads(call.arguments), dict)


TEMPLATES = {
    "hermes": "For each call: <tool_call>\n{...}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=one>",
    "glm45": "<tool_call>{name}<arg_key>{key}</arg_key>",
    "mistral": "{{ '[TOOL_CALLS]' }}",
    "openai": "<|start|>assistant<|channel|>commentary<|message|>",
    "llama3_json": "{{ '<|python_tag|>' }}",
    "deepseek_v3": "<｜tool▁calls▁begin｜>...\n```json\n",  # noqa: RUF001
    "deepseek_v31": "<｜tool▁calls▁begin｜>",  # noqa: RUF001
    "kimi_k2": "<|tool_calls_section_begin|>",
    "seed_oss": "<seed:tool_call>\n<function=example>\n<parameter=one>",
    "minimax_m2": '{% set begin = "<minimax:tool_call>" %}<invoke name="',
    "olmo3": "<function_calls>",
    "lfm2": "<|tool_call_start|>",
    "pythonic": "[func_name1(params)] between <|python_start|> and <|python_end|>",
    "granite": "<|tool_call|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_auto_finds_the_format_in_the_chat_template(name: str) -> None:
    tokenizer = byte_tokenizer(chat_template=TEMPLATES[name])
    assert find_tool_format("auto", tokenizer) is FORMATS[name]
    assert find_tool_format("pythonic", tokenizer) is FORMATS["pythonic"]
    assert find_tool_format("none", tokenizer) is None


@pytest.mark.parametrize("template", ["{{ messages }}", "]<]minimax[>[<tool_call><invoke name="])
def test_auto_fails_for_an_unknown_format(template: str) -> None:
    with pytest.raises(UsageError, match="tool_parser is auto, but the chat template"):
        find_tool_format("auto", byte_tokenizer(chat_template=template))


def test_row_tools_reads_structs_and_json() -> None:
    as_struct = [{"type": None, "function": {"name": b"f", "parameters": '{"a": 1}'}}]
    whole = {"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}
    assert checked_tools(as_struct) == checked_tools(json.dumps([whole])) == [whole]
    assert row_tools(None, "required", "x") is None
    assert row_tools([whole], "none", "x") is None
    assert row_tools("[]", "auto", "x") is None
    assert row_tools(b"", "required", "x") is None
    named = {"type": "function", "function": {"name": "f"}}
    assert row_tools([whole], named, "x") == RowTools([whole], named)
    assert row_tools([whole], None, "x") == RowTools([whole])


@pytest.mark.parametrize(
    ("tools", "choice", "problem"),
    [
        ("[", "auto", "tools are not JSON"),
        (5, "auto", "tools are 5; they must be a list"),
        ([5], "auto", r"tools\[0\] is not {type: function"),
        ([{"type": "x", "function": {"name": "f"}}], "auto", r"tools\[0\] is no"),
        ([tool("a b")], "auto", 'tools.0. has the name "a b"'),
        ([tool("f"), tool("f")], "auto", "two tools have the name f"),
        ([tool("f")], "often", 'tool_choice is "often"; it must be auto'),
        (
            [tool("f")],
            {"type": "function", "function": {"name": "g"}},
            r"tool_choice names \"g\"; the tools are: f$",
        ),
    ],
)
def test_invalid_tools_are_refused(tools: Any, choice: Any, problem: str) -> None:
    with pytest.raises(RowError, match=f"row: {problem}") as caught:
        row_tools(tools, choice, "row")
    assert caught.value.code == "unsupported_content"


def test_ids_of_tool_calls() -> None:
    call, other = ToolCall("f", "{}"), ToolCall("f", '{"a": 1}')
    ids = {call.as_openai(0)["id"], call.as_openai(1)["id"], other.as_openai(0)["id"]}
    assert len(ids) == 3
    assert ToolCall("f", "{}").as_openai(0) == call.as_openai(0)
