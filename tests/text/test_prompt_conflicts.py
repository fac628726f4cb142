"""Settings of the prompt that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.config import PromptConfig
from batchinfer.text.prompt_sources import conflicts

HI = ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({"messages": []}, ["messages"]),
        ({"template": " \n"}, ["template"]),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, ["chat_template_kwargs"]),
        ({"chat_template": "none", "messages": HI, "system": "x"}, ["system", "messages"]),
        ({"chat_template": "none", "chat_template_kwargs": {"a": 1}}, ["chat_template_kwargs"]),
        ({"token_ids_column": "ids", "system": "x"}, ["system"]),
        ({"token_ids_column": "ids", "chat_template": "f.jinja"}, ["chat_template"]),
        ({"token_ids_column": "ids", "parse_special_tokens": True}, ["parse_special_tokens"]),
    ],
)
def test_prompt_conflicts_name_each_key(config: dict[str, Any], keys: list[str]) -> None:
    assert [key for key, _ in conflicts(PromptConfig(**config))] == [f"prompt.{k}" for k in keys]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"messages": HI, "system": "x", "chat_template_kwargs": {"enable_thinking": False}},
        {"template": "{{ x }}", "chat_template": "none", "parse_special_tokens": True},
        {"token_ids_column": "ids", "chat_template": "none"},
    ],
)
def test_valid_prompt_settings_have_no_conflicts(config: dict[str, Any]) -> None:
    assert not list(conflicts(PromptConfig(**config)))
