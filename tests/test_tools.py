"""Tools with a tiny random model: jobs, batches and Python calls.

If a call is required, a grammar makes even a random model write one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from openai.types.chat import ChatCompletion
from transformers import AutoTokenizer

from batchinfer import LLM, SamplingParams
from batchinfer.errors import ExitCode, RowError, UsageError
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.requests.requests import PromptRow, RequestMaker, RowSampling
from batchinfer.requests.tool_choice import ToolChoices
from batchinfer.text.prompts import Prompt
from batchinfer.text.reasoning.formats import find_reasoning_format
from batchinfer.text.reasoning.grammar import ReasoningGrammar
from batchinfer.text.structured.compiled_grammar import CompiledGrammar, GrammarCompiler
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.text.tools.formats import FORMATS
from batchinfer.text.tools.row_tools import RowTools
from tests.job.datasets import write_parquet
from tests.models import CHAT_TEMPLATE, make_text_model
from tests.openai_batches import answers, request
from tests.text.reasoning.test_split import GPT_OSS, QWEN
from tests.text.reasoning.tokenizers import EOS, encode

TALK = [{"role": "user", "content": "hello"}]
SHOWS_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}Answer with "
    "<tool_call>...</tool_call>\n{% endif %}"
)


def tool(name: str, *choices: str) -> dict[str, Any]:
    properties = {"what": {"enum": list(choices)}}
    schema = {"type": "object", "properties": properties, "required": ["what"]}
    parameters = {**schema, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


LAMP, DOOR = tool("lamp", "on", "off"), tool("door", "open", "shut")
CALL_LAMP = {"type": "function", "function": {"name": "lamp"}}


def make_tool_model(path: Path) -> Path:
    """Write a tiny model whose chat template shows tools."""
    make_text_model(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = SHOWS_TOOLS + CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("model") / "tiny")


def job(folder: Path, model: Path, rows: dict[str, Any], **sections: Any) -> JobSpec:
    write_parquet(folder / "in.parquet", rows)
    fields = {
        "model": {"name": str(model), "dtype": "float32"},
        "input": {"path": str(folder / "in.parquet"), "keep_columns": []},
        "sampling": {"max_tokens": 400, "seed": 1},
        "engine": {"num_kv_blocks": 200},
        "output": {"path": str(folder / "out"), "include": ["prompt"]},
        **sections,
    }
    (folder / "job.yaml").write_text(json.dumps(fields))
    return load_job(folder / "job.yaml")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder / "out" / "data").to_pylist()
    return found


def test_job_with_required_tool_choice(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([LAMP, DOOR]))
    prompt = {"tools": "tools.json", "tool_choice": "required"}
    rows = {"prompt": ["hello", "go"], "sampling_params": ['{"n": 2}', None]}
    assert run_job(job(tmp_path, model, rows, prompt=prompt), quiet=True) is ExitCode.OK
    done = rows_of(tmp_path)
    ids = set()
    for row in done:
        assert row["prompt"].startswith("lamp door Answer with")
        assert row["tool_calls"] == row["outputs"][0]["tool_calls"]
        for sample in row["outputs"]:
            assert (sample["finish_reason"], sample["text"]) == ("stop", "")
            for call in sample["tool_calls"]:
                ids.add((row["row_id"], call["id"]))
                assert call["type"] == "function"
                allowed = {"lamp": ("on", "off"), "door": ("open", "shut")}
                arguments = json.loads(call["function"]["arguments"])
                assert arguments["what"] in allowed[call["function"]["name"]]
    assert len(ids) == sum(len(one["tool_calls"]) for row in done for one in row["outputs"])


def test_tools_column(model: Path, tmp_path: Path) -> None:
    tools = [json.dumps([LAMP]), None, "["]
    spec = job(
        *(tmp_path, model, {"prompt": ["a", "b", "c"], "tools": tools}),
        prompt={"column": "prompt", "tools_column": "tools", "tool_choice": CALL_LAMP},
        sampling={"max_tokens": 200, "temperature": 0},
        errors={"max_error_rate": 1},
    )
    assert run_job(spec, quiet=True) is ExitCode.OK
    with_lamp, without, broken = rows_of(tmp_path)
    (call,) = with_lamp["tool_calls"]
    assert call["function"]["name"] == "lamp"
    assert "lamp" not in without["prompt"]
    assert without["tool_calls"] is None
    assert broken["error"]["code"] == "unsupported_content"
    assert broken["error"]["message"].startswith("column tools: tools are not JSON")


def test_invalid_tools_and_parsers_are_refused(model: Path, tmp_path: Path) -> None:
    rows = {"prompt": ["a"]}
    with pytest.raises(UsageError, match=r"prompt.*tool_choice needs tools"):
        job(tmp_path, model, rows, prompt={"tool_choice": "required"})
    with pytest.raises(UsageError, match=r"prompt\.tools cannot be used: two tools have the name"):
        job(tmp_path, model, rows, prompt={"tools": [LAMP, LAMP]})
    with pytest.raises(UsageError, match=r"prompt\.tools: there is no file .*no\.json"):
        job(tmp_path, model, rows, prompt={"tools": "no.json"})
    with pytest.raises(UsageError, match=r"tool_parser .hermse. is not known; did you mean hermes"):
        job(tmp_path, model, rows, output={"path": "out", "tool_parser": "hermse"})
    with pytest.raises(
        UsageError, match=r"tool_parser .zork. is not known; known: auto, none, hermes"
    ):
        job(tmp_path, model, rows, output={"path": "out", "tool_parser": "zork"})
    plain = tmp_path / "plain.jinja"
    plain.write_text("{{ messages[0].content }}")
    prompt = {"tools": [LAMP], "chat_template": str(plain)}
    output = {"path": str(tmp_path / "out"), "tool_parser": "hermes"}
    with pytest.raises(UsageError, match="the chat template does not use tools"):
        run_job(job(tmp_path, model, rows, prompt=prompt, output=output), quiet=True)


def test_batch_files_with_tools(model: Path, tmp_path: Path) -> None:
    body: dict[str, Any] = {"messages": TALK, "max_tokens": 200, "tools": [LAMP, DOOR]}
    spoken = {"role": "assistant", "content": "", "tool_calls": [{**CALL_LAMP, "id": "1"}]}
    spoken["tool_calls"][0]["function"] = {"name": "lamp", "arguments": '{"what": "on"}'}
    bodies = [
        {**body, "tool_choice": CALL_LAMP},
        {**body, "tool_choice": "none", "max_tokens": 5},
        {**body, "tools": [{"type": "function"}]},
        {"messages": [*TALK, spoken, {"role": "tool", "content": "done"}], "max_tokens": 3},
    ]
    requests = [request(str(at), **one) for at, one in enumerate(bodies)]
    found = answers(tmp_path, model, requests, num_kv_blocks=100, tool_call_parser="auto")
    called, told_not_to, wrong, turn = found.values()
    answer = ChatCompletion.model_validate(called["response"]["body"])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert [call.type for call in choice.message.tool_calls or ()] == ["function"]
    plain = ChatCompletion.model_validate(told_not_to["response"]["body"]).choices[0]
    assert plain.message.tool_calls is None
    assert plain.message.content is not None
    assert wrong["response"]["body"]["error"]["code"] == "invalid_request"
    assert turn["response"]["status_code"] == 200


def test_chat_parses_tool_calls(model: Path) -> None:
    llm = LLM(str(model), dtype="float32", num_kv_blocks=100, tool_parser="hermes")
    call = '<tool_call>\n{"name": "lamp", "arguments": {"what": "on"}}\n</tool_call>'
    params = SamplingParams(max_tokens=200, structured_outputs={"choice": [f"I do.{call}"]})
    with_tools, without = (
        llm.chat(TALK, params, tools=tools, use_tqdm=False)[0] for tools in ([LAMP], [])
    )
    (sample,) = with_tools.outputs
    assert (with_tools.prompt or "").startswith("lamp Answer with")
    assert sample.text == "I do."
    assert [(one.name, one.arguments) for one in sample.tool_calls] == [("lamp", '{"what": "on"}')]
    assert without.outputs[0].text == f"I do.{call}"
    assert without.outputs[0].tool_calls == ()


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, dtype="float32", num_kv_blocks=200, tool_parser="hermes")


@pytest.mark.parametrize(
    ("choice", "names", "shown"),
    [
        ("required", {"lamp", "door"}, True),
        (CALL_LAMP, {"lamp"}, True),
        ("auto", set(), True),
        ("none", set(), False),
    ],
)
def test_chat_follows_tool_choice(llm: LLM, choice: Any, names: set[str], shown: bool) -> None:
    params = SamplingParams(max_tokens=200, n=4, seed=3)
    (output,) = llm.chat(TALK, params, tools=[LAMP, DOOR], tool_choice=choice, use_tqdm=False)
    assert (output.prompt or "").startswith("lamp door Answer with") == shown
    for sample in output.outputs:
        called = {call.name for call in sample.tool_calls}
        assert called <= names
        assert bool(called) == bool(names)
        for call in sample.tool_calls:
            choices = {"lamp": ("on", "off"), "door": ("open", "shut")}[call.name]
            assert json.loads(call.arguments)["what"] in choices


def test_invalid_tool_choices_are_refused(llm: LLM, model: Path) -> None:
    plain = SamplingParams(max_tokens=4)
    held = SamplingParams(structured_outputs={"choice": ["a"]})
    named = {"type": "function", "function": {"name": "window"}}
    for tools, choice, params, message in (
        ([LAMP], "often", plain, 'tool_choice is "often"; it must be auto, none, required or'),
        ([LAMP], named, plain, r"tool_choice names \"window\"; the tools are: lamp$"),
        ([LAMP], None, plain, "tool_choice is null; it must be"),
        ([], "required", plain, "tool_choice is 'required', but the call has no tools"),
        (None, CALL_LAMP, plain, "but the call has no tools"),
        (
            [LAMP],
            "required",
            held,
            "prompt 0: structured_outputs cannot be combined with a tool_choice",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            llm.chat(TALK, params, tools=tools, tool_choice=choice, use_tqdm=False)
    talks = [TALK, TALK]
    outputs = llm.chat(
        talks, [held, plain], tools=[LAMP], tool_choice="required", errors="return", use_tqdm=False
    )
    assert [output.error is None for output in outputs] == [False, True]
    without = LLM(model, dtype="float32", num_kv_blocks=8)
    with pytest.raises(
        ValueError, match=r"needs the model's tool-call format; give LLM\(tool_parser='auto'\)"
    ):
        without.chat(TALK, plain, tools=[LAMP], tool_choice="required")


def test_tool_parser_auto_reads_the_template_of_the_llm(tmp_path: Path) -> None:
    """The LLM's chat template, not the model's, shows tools."""
    plain = make_text_model(tmp_path)
    llm = LLM(
        plain, num_kv_blocks=200, tool_parser="auto", chat_template=SHOWS_TOOLS + CHAT_TEMPLATE
    )
    params = SamplingParams(max_tokens=200, seed=1)
    (output,) = llm.chat(TALK, params, tools=[LAMP], tool_choice=CALL_LAMP, use_tqdm=False)
    assert [call.name for call in output.outputs[0].tool_calls] == ["lamp"]


TOOLS = RowTools([{"type": "function", "function": {"name": "f"}}], "required")
PLAIN = RowSampling(SamplingParams(seed=1), own_seed=False)
BUDGET = RowSampling(SamplingParams(seed=1, max_reasoning_tokens=5), own_seed=False)


def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, frozenset(encode(tokenizer, EOS).tolist()), 320)


@pytest.mark.parametrize(
    ("tokenizer", "name", "kind"),
    [(QWEN, "hermes", ReasoningGrammar), (GPT_OSS, "openai", CompiledGrammar)],
)
def test_tool_call_grammar_includes_reasoning(tokenizer: Tokenizer, name: str, kind: type) -> None:
    compiler = grammars(tokenizer)
    sampling = ToolChoices(FORMATS[name], tokenizer, compiler).applied(PLAIN, TOOLS)
    assert isinstance(sampling, RowSampling)
    maker = RequestMaker(
        *(tokenizer, frozenset({0}), compiler), find_reasoning_format("auto", tokenizer)
    )
    prompt = Prompt(np.array([1, 2], np.int32), None, truncated=False, has_control_text=False)
    assert type(maker.make(PromptRow(0, prompt, sampling, tools=TOOLS)).grammar) is kind


def test_tool_call_grammar_with_reasoning_has_no_budget() -> None:
    harmony = ToolChoices(FORMATS["openai"], GPT_OSS, grammars(GPT_OSS)).applied(BUDGET, TOOLS)
    assert isinstance(harmony, RowError)
    assert harmony.message.startswith("max_reasoning_tokens cannot be combined with a tool_choice")
    hermes = ToolChoices(FORMATS["hermes"], QWEN, grammars(QWEN)).applied(BUDGET, TOOLS)
    assert isinstance(hermes, RowSampling)
