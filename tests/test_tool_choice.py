"""Rows that must call a tool, as models write calls that think in front of them."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.config import SamplingParams
from batchinfer.errors import RowError
from batchinfer.requests.requests import PromptRow, RequestMaker, RowSampling
from batchinfer.requests.tool_choice import ToolChoices
from batchinfer.text.grammar import CompiledGrammar, GrammarCompiler
from batchinfer.text.prompts import Prompt
from batchinfer.text.reasoning.formats import find_reasoning_format
from batchinfer.text.reasoning.grammar import ReasoningGrammar
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.text.tools.formats import FORMATS
from batchinfer.text.tools.row_tools import RowTools
from tests.text.reasoning.test_split import GPT_OSS, QWEN
from tests.text.reasoning.tokenizers import EOS, encode

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
        *(tokenizer, frozenset({0}), compiler),
        find_reasoning_format("auto", tokenizer),
    )
    prompt = Prompt(np.array([1, 2], np.int32), None, truncated=False, has_control_text=False)
    assert type(maker.make(PromptRow(0, prompt, sampling, tools=TOOLS)).grammar) is kind


def test_tool_call_grammar_with_reasoning_has_no_budget() -> None:
    harmony = ToolChoices(FORMATS["openai"], GPT_OSS, grammars(GPT_OSS)).applied(BUDGET, TOOLS)
    assert isinstance(harmony, RowError)
    assert harmony.message.startswith("max_reasoning_tokens cannot be combined with a tool_choice")
    hermes = ToolChoices(FORMATS["hermes"], QWEN, grammars(QWEN)).applied(BUDGET, TOOLS)
    assert isinstance(hermes, RowSampling)
