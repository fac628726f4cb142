"""Chat templates render and tokenize as transformers' ``apply_chat_template`` does."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from batchinfer.config import PromptConfig
from batchinfer.errors import ModelError, RowError
from batchinfer.text.chat import ChatTemplate
from batchinfer.text.prompts import Prompt, PromptBuilder
from tests.text.conftest import CHATML, INSTRUCT, wrap

LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday: " + date_string + "\\n\\n" + system_message + "<|im_end|>" }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|im_start|>' + message['role'] + '\\n' }}
        {%- for call in message.tool_calls %}
            {{- call | tojson }}
            {%- if not loop.last %}{{- ', ' }}{% endif %}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{% endif %}
"""
QWEN_LIKE = """{%- set ns = namespace(last=messages|length - 1) -%}
{%- macro say(role, text) -%}
<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro -%}
{% for message in messages %}
  {% if message.role == "assistant" and loop.index0 < ns.last %}
    {% generation %}
{{ say("assistant", message.content.split("</think>")[-1].lstrip("\\n")) }}
    {% endgeneration %}
  {% else %}
{{ say(message.role, message.content) }}
  {% endif %}
  {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
TEMPLATES = {"chatml": CHATML, "instruct": INSTRUCT, "llama-3": LLAMA_3, "qwen": QWEN_LIKE}

ASKED = [{"role": "user", "content": " hello <world> & 'you' \n"}]
ANSWERED = [
    *ASKED,
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nhi there "},
    {"role": "user", "content": "naïve 東京 🙂"},
]
OPEN = [*ASKED, {"role": "assistant", "content": "The answer is "}]
WITH_SYSTEM = [{"role": "system", "content": "Be brief. "}, *ANSWERED]
WITH_TOOLS = [
    *ASKED,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "f", "arguments": {"é<": 1}}, {"name": "g"}],
    },
    {"role": "tool", "content": "3"},
]
REASONED = [*ASKED, {"role": "assistant", "content": "4", "reasoning": "2 + 2"}, *ASKED]
CONVERSATIONS = [ASKED, ANSWERED, OPEN, WITH_SYSTEM, WITH_TOOLS, REASONED]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False, "date_string": "today"}])
def test_prompts_equal_transformers(reference: Any, template: str, kwargs: dict[str, Any]) -> None:
    conversations = CONVERSATIONS
    if template == INSTRUCT:
        conversations = [ASKED, ANSWERED, OPEN, REASONED]
    builder = PromptBuilder(
        PromptConfig(chat_template="file", chat_template_kwargs=kwargs),
        wrap(reference),
        max_model_len=10_000,
        columns=["messages"],
        chat_template_source=template,
    )

    prompts = builder.build([{"messages": conversation} for conversation in conversations])

    for conversation, prompt in zip(conversations, prompts, strict=True):
        is_open = conversation[-1]["role"] == "assistant"
        arguments = {
            "chat_template": template,
            "add_generation_prompt": not is_open,
            "continue_final_message": is_open,
            **kwargs,
        }
        assert isinstance(prompt, Prompt), prompt
        assert prompt.text == reference.apply_chat_template(
            conversation, tokenize=False, **arguments
        )
        ids = reference.apply_chat_template(conversation, return_dict=True, **arguments)
        assert prompt.token_ids.tolist() == ids["input_ids"]


def chat_template(source: str, **kwargs: Any) -> ChatTemplate:
    return ChatTemplate(
        source,
        special_tokens={"bos_token": "<s>"},
        kwargs=kwargs,
        now=datetime(2026, 11, 20, 12, 0),
        error=ModelError,
        origin="the model's chat template",
    )


def test_strftime_now_gives_the_time_of_the_job() -> None:
    template = chat_template("{{ strftime_now('%d %b %Y') }}")

    assert template.render(ASKED) == "20 Nov 2026"


def test_generation_block_has_its_own_scope() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"

    assert chat_template(source).render(ASKED) == "21"


def test_chat_template_kwargs_override_special_tokens() -> None:
    assert chat_template("{{ bos_token }}{{ tools }}").render(ASKED) == "<s>None"
    assert chat_template("{{ bos_token }}", bos_token="<b>").render(ASKED) == "<b>"


def test_an_undefined_name_is_empty_as_in_transformers() -> None:
    assert chat_template("[{{ messages[0].nothing }}{{ nothing }}]").render(ASKED) == "[]"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "no attribute 'missing'"),
        pytest.param(
            "{% for m in messages %}{{ m.content * 10000000 }}{% endfor %}",
            "has more than",
            marks=pytest.mark.long,
        ),
        ("{% set ns = namespace() %}{% set ns._private = 1 %}", "_"),
    ],
)
def test_failing_chat_template_is_a_row_error(source: str, reason: str) -> None:
    with pytest.raises(RowError, match=f"the model's chat template: .*{reason}") as caught:
        chat_template(source).render(ASKED)

    assert caught.value.code == "template_error"


@pytest.mark.parametrize("source", ["{% for %}", "{{ messages.__class__ }}"])
def test_invalid_chat_template_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="the model's chat template"):
        chat_template(source)


@pytest.mark.parametrize(
    "source",
    ["nothing of it", "{{ messages[-1].content[:3] }}", "{{ messages[-1].content | upper }}"],
)
def test_a_last_message_that_the_template_changes_cannot_be_continued(source: str) -> None:
    with pytest.raises(RowError, match="cannot be continued"):
        chat_template(source).render(OPEN)


def test_a_last_message_without_text_cannot_be_continued() -> None:
    with pytest.raises(RowError, match="no text to continue"):
        chat_template(CHATML).render([*ASKED, {"role": "assistant", "tool_calls": [{"name": "f"}]}])
