"""Contents that are lists of text parts reach a chat template in the form that it supports.

The reference is transformers, which passes such lists to templates unchanged.
"""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from batchinfer.errors import ModelError, RowError
from batchinfer.text.chat import ChatTemplate, ContentFormat
from batchinfer.text.row_values import as_messages, require_content
from tests.text.conftest import CHATML

ANY, TEXT, PARTS = ContentFormat.ANY, ContentFormat.TEXT, ContentFormat.PARTS
END = "{% if add_generation_prompt %}<a>{% endif %}"


def turns(body: str, before: str = "") -> str:
    """Return a template that writes each message's role, and ``body`` for its content."""
    start = before + "{% for message in messages %}<{{ message.role[0] }}>"
    return start + body + "{% endfor %}" + END


LOOP = (
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}"
)
MACRO = (
    "{%- macro visible(content) -%}{%- if content is string -%}{{ content }}"
    "{%- elif content is iterable and content is not mapping -%}"
    "{%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}"
    "{{ item.text }}{%- elif item is string -%}{{ item }}{%- endif -%}{%- endfor -%}"
    "{%- else -%}{{ content }}{%- endif -%}{%- endmacro -%}"
)
USER_ONLY = (
    "{% if message.role == 'user' %}" + LOOP + "{% else %}{{ message.content | trim }}{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
LAST_ONE_OPEN = (
    LOOP + "{% if not loop.last or message.role == 'user' %}</{{ message.role[0] }}>{% endif %}"
)
JOINED = (
    "{{ message.content if message.content is string "
    "else message.content | map(attribute='text') | join(' ') }}"
)
ALONE = "{% for part in message.content %}{{ part.text }}{% endfor %}"
TRIMMED = "{{ message.content | trim if message.content is string else message.content[0].text }}"
STYLES: dict[str, tuple[str, ContentFormat]] = {
    "chatml": (CHATML, TEXT),
    "concatenation": (turns("{{ '' + message.content }}"), TEXT),
    "json": (turns("{{ message.content | tojson }}"), TEXT),
    "trim": (turns("{{ message['content'] | trim }}"), TEXT),
    "the first part": (turns(TRIMMED), TEXT),
    "loop": (turns(LOOP), ANY),
    "macro": (turns("{{ visible(message.content) }}", MACRO), ANY),
    "macro, trimmed": (turns("{{ visible(message.content) | trim }}\n", MACRO), ANY),
    "filters": (turns(JOINED), ANY),
    "alternating roles": (turns(LOOP, ALTERNATING), ANY),
    "last one open": (turns(LAST_ONE_OPEN), ANY),
    "of the user alone": (turns(USER_ONLY), ANY),
    "told of parts": (turns(LOOP, 'Answer as {"type": "text", "text": "..."}.\n'), ANY),
    "nothing but parts": (turns(ALONE), PARTS),
}


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


TALKS: list[list[dict[str, Any]]] = [
    [user("Hi ", "there")],
    [user("Hi"), {"role": "assistant", "content": "Yes?"}, user(" a\n", "", "\tb", "naïve 東京")],
    [user("Go "), {**user("On", "e, two, "), "role": "assistant"}],
    [{"role": "user", "content": "text alone"}],
]


def chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(
        source,
        special_tokens={},
        kwargs={},
        now=datetime(2026, 11, 22),
        error=ModelError,
        origin="the model's chat template",
    )


def joined(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with its text parts joined as in vLLM."""
    return [
        {**m, "content": "\n".join(part["text"] for part in m["content"])}
        if isinstance(m["content"], list)
        else m
        for m in talk
    ]


def split(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with each text as a list of one part."""
    return [
        m if isinstance(m["content"], list) else {**user(m["content"]), "role": m["role"]}
        for m in talk
    ]


@pytest.mark.parametrize(("source", "expected"), STYLES.values(), ids=STYLES)
def test_contents_have_the_form_that_the_template_takes(
    source: str, expected: ContentFormat
) -> None:
    template = chat_template(source)
    given = {ANY: copy.deepcopy, TEXT: joined, PARTS: split}[expected]

    assert template.content_format("user") is expected
    for talk in TALKS:
        is_open = talk[-1]["role"] == "assistant"
        if is_open and source in (STYLES["json"][0], STYLES["of the user alone"][0]):
            continue
        (wanted,), _ = render_jinja_template(
            [given(talk)],
            chat_template=source,
            add_generation_prompt=not is_open,
            continue_final_message=is_open,
        )
        assert template.render(as_messages(talk, "messages")) == wanted


def test_content_format_may_depend_on_the_role() -> None:
    template = chat_template(STYLES["of the user alone"][0])

    roles = {role: template.content_format(role) for role in ("system", "user", "assistant")}

    assert roles == {"system": TEXT, "user": ANY, "assistant": TEXT}
    talk = [{**user("Be", "brief"), "role": "system"}, user("a", "b")]
    assert template.render(as_messages(talk, "messages")) == "<s>Be\nbrief<u>ab<a>"


def test_parts_without_a_type_and_plain_texts_are_text() -> None:
    talk = [{"role": "user", "content": [{"text": "a"}, "b", {"type": "text", "text": "c"}]}]

    assert chat_template(turns(LOOP)).render(as_messages(talk, "messages")) == "<u>abc<a>"


@pytest.mark.parametrize("content", [[], [{"type": "text", "text": " "}]])
def test_a_conversation_of_empty_parts_is_empty(content: list[Any]) -> None:
    with pytest.raises(RowError, match="the conversation is empty"):
        require_content(as_messages([{"role": "user", "content": content}], "messages"), "")
