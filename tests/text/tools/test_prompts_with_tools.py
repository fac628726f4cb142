"""Tools reach the chat template; tools of a row are read as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError, UsageError
from batchinfer.text.prompts import Prompt, PromptBuilder
from tests.text.reasoning.tokenizers import EOS, byte_tokenizer

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}|{{ messages[0].content }}<eos>"
TOKENIZER = byte_tokenizer(chat_template=TEMPLATE)


def tool(name: str, word: str = "x") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {word: {"description": word}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def build(row: dict[str, Any], **config: Any) -> Prompt | RowError:
    columns = ["prompt", *(["own"] if "tools_column" in config else [])]
    builder = PromptBuilder(
        PromptConfig(column="prompt", **config), TOKENIZER, max_model_len=1000, columns=columns
    )
    (prompt,) = builder.build([{"prompt": "hi", **row}])
    return prompt


def text_of(prompt: Prompt | RowError) -> str:
    assert isinstance(prompt, Prompt)
    assert TOKENIZER.num_control_ids(prompt.token_ids) == 1
    return prompt.text or ""


def test_tools_of_the_job() -> None:
    text = text_of(build({}, tools=(tool("f"), tool("g"))))
    assert json.loads(text.partition("|")[0]) == [tool("f"), tool("g")]
    assert text_of(build({}, tools=(tool("f"),), tool_choice="none")).startswith("|hi")


@pytest.mark.parametrize("word", ["x", EOS, f"a{EOS}b", EOS[:-1], EOS[1:]])
def test_tools_of_a_row_are_text(word: str) -> None:
    """No text in the tools, including their keys, becomes a control token."""
    own = [tool("f", word)]
    as_struct = [{**own[0], "unused": None}]
    for value in (json.dumps(own), json.dumps(own).encode(), as_struct):
        text = text_of(build({"own": value}, tools_column="own"))
        assert json.loads(text.partition("|")[0]) == own
    escaped = json.dumps(own).replace("<", "\\u003c")
    assert json.loads(text_of(build({"own": escaped}, tools_column="own")).partition("|")[0]) == own
    assert text_of(build({"own": None}, tools_column="own")).startswith("|hi")


def test_a_template_without_tools_refuses_them() -> None:
    plain = byte_tokenizer(chat_template="{{ messages[0].content }}")
    config = PromptConfig(column="prompt", tools=(tool("f"),))
    with pytest.raises(UsageError, match="does not use tools"):
        PromptBuilder(config, plain, max_model_len=9, columns=["prompt"])
