"""Renders a conversation with a chat template, as transformers' ``apply_chat_template`` does.

The content of a message may be a list of text parts. Some templates accept both texts and lists of
parts, some only texts, and some only lists, and this may depend on the role. Rendering a test
conversation shows which form a template accepts. (vLLM instead analyzes the template's syntax in
``vllm/entrypoints/chat_utils.py``, which fails if the content passes through a macro or a filter.)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, Literal

import jinja2

from batchinfer.errors import JobError, RowError
from batchinfer.text.sandbox import PromptEnvironment, error_line, render_template
from batchinfer.text.tools.tool_format import Tools

Message = dict[str, Any]
FinalMessage = Literal["auto", "answer", "continue", "leave"]
"""How a prompt ends. auto: continue the last message if it is the assistant's, else start a new
assistant message; answer: always start a new assistant message; continue: always continue the last
message; leave: do neither."""

_END_MARK = "\U0010fffd "
"""Mark that is appended to the message to continue. If the rendered text lacks the mark's space,
the template strips whitespace from messages."""
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_PROBES = ("first7tExt", "second7tExt")
"""Texts for test conversations; no template contains these texts."""
_WRITTEN_AS_LIST = re.compile(rf"""['"]text['"]:\s*['"]{_PROBES[0]}""")
_TURNS = {"system": 0, "developer": 0, "user": 0, "assistant": 1, "tool": 2}
"""Number of messages that precede a message of each role in a test conversation."""
RESERVED_KWARGS = frozenset({"messages", "add_generation_prompt", "continue_final_message"})


@functools.cache
def _environment() -> PromptEnvironment:
    return PromptEnvironment(trim_blocks=True, lstrip_blocks=True)


def compile_chat_template(source: str, error: type[JobError], origin: str) -> jinja2.Template:
    """Compile ``source``; ``origin`` is the template's name in error messages.

    Raises:
        JobError: the template has a syntax error or reads a private attribute. ``error`` is the
            type of this exception.
    """
    try:
        return _environment().compile_template(source)
    except jinja2.TemplateError as cause:
        reason = f"{error_line(cause)}: {cause.message}"
        raise error(f"{origin} is not a valid Jinja2 template{reason}") from cause


class ContentFormat(Enum):
    """The form in which a template accepts the content of a message."""

    ANY = "a text or a list of parts"
    TEXT = "a text"
    PARTS = "a list of parts"


class ChatTemplate:
    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        kwargs: Mapping[str, Any],
        now: datetime,
        error: type[JobError],
        origin: str,
        final_message: FinalMessage = "auto",
    ) -> None:
        """Compile ``source``.

        Args:
            special_tokens: texts of special tokens, keyed by their names in templates
                (``bos_token``).
            kwargs: further variables, which override ``special_tokens``.
            now: time for ``strftime_now``, the same for all rows.
            error: type of the error for an invalid template.
            origin: name of the template in errors.

        Raises:
            JobError: the template has a syntax error or reads a private attribute. ``error`` is the
                type of this exception.
        """
        self._origin = origin
        self._final_message = final_message
        self._template = compile_chat_template(source, error, origin)
        self._variables = {
            "tools": None,
            "documents": None,
            "strftime_now": now.strftime,
            **special_tokens,
            **kwargs,
        }
        self.content_format = functools.cache(self._find_format)
        """Returns the form of content that the template accepts for a role."""

    def _find_format(self, role: str) -> ContentFormat:
        parts = [{"type": "text", "text": text} for text in _PROBES]
        shown = self._probe(role, parts)
        # A template that accepts only text prints the list as Python or JSON.
        if not all(text in shown for text in _PROBES) or _WRITTEN_AS_LIST.search(shown):
            return ContentFormat.TEXT
        takes_text = _PROBES[0] in self._probe(role, _PROBES[0])
        return ContentFormat.ANY if takes_text else ContentFormat.PARTS

    def _probe(self, role: str, content: object) -> str:
        """Render a conversation with a message of ``role``; return "" if rendering fails."""
        plain = "x" if isinstance(content, str) else [{"type": "text", "text": "x"}]
        call = {"type": "function", "function": {"name": "x", "arguments": {}}, "id": "123456789"}
        before: list[Message] = [
            {"role": "user", "content": plain},
            {"role": "assistant", "content": plain},
        ]
        messages = [*before[: _TURNS.get(role, 0)], {"role": role, "content": content}]
        if role == "tool":
            messages[1] = {**before[1], "tool_calls": [call]}
            messages[2] |= {"name": "x", "tool_call_id": "123456789"}
        if role != "user":
            messages.append(before[0])
        try:
            return self._render(messages, None, add_generation_prompt=False)
        except RowError:
            return ""

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text; ``final_message`` decides how the text ends.

        Args:
            variables: further variables of the template, which override ``kwargs``.

        Raises:
            RowError: ``template_error``.
        """
        messages = [self._as_taken(_with_reasoning_names(message)) for message in messages]
        added = {**(variables or {}), **({} if tools is None else {"tools": list(tools)})}
        end = self._final_message
        if end == "auto":
            end = "continue" if messages[-1]["role"] == "assistant" else "answer"
        if end == "continue":
            return self._render_open(messages, added)
        return self._render(messages, added, add_generation_prompt=end == "answer")

    def _as_taken(self, message: Message) -> Message:
        """Convert a message's content to a form that the template accepts."""
        content = message.get("content")
        if not content:
            return message
        form = self.content_format(message["role"])
        if isinstance(content, list) and form is ContentFormat.TEXT:
            if any(part["type"] != "text" for part in content):
                raise RowError("unsupported_content", f"{self._origin} does not accept images")
            return {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and form is ContentFormat.PARTS:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        variables = {
            **self._variables,
            **(variables or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        return render_template(self._template, variables, self._origin)

    def _render_open(self, messages: list[Message], variables: Mapping[str, Any]) -> str:
        """Render a prompt that ends within the last message, so that the model continues it.

        Like transformers, mark the end of the message, render, and cut the text at the mark.
        """
        last = messages[-1]
        content = last.get("content")
        *others, end = content if isinstance(content, list) and content else [content]
        text = end.get("text") if isinstance(end, dict) else end
        if not isinstance(text, str):
            raise RowError("template_error", "the last message has no text to continue")
        marked: Any = text + _END_MARK
        if isinstance(end, dict):
            marked = [*others, {**end, "text": marked}]
        rendered = self._render(
            [*messages[:-1], {**last, "content": marked}], variables, add_generation_prompt=False
        )
        at = rendered.rfind(_END_MARK.rstrip())
        if at < 0 or text.strip() not in rendered:
            reason = "the template removes or changes the last message"
            raise RowError("template_error", f"{self._origin}: {reason}, so it cannot be continued")
        trims = not rendered.startswith(_END_MARK, at)
        return rendered[:at].rstrip() if trims else rendered[:at]


def _with_reasoning_names(message: Message) -> Message:
    """Store a message's reasoning under every key that chat templates read."""
    texts = (message[key] for key in _REASONING_KEYS if message.get(key) is not None)
    reasoning = next(texts, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
