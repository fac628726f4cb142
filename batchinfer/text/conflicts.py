"""Settings of the prompt that contradict each other, whatever the data and the model."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.config import PromptConfig
from batchinfer.text.chat import RESERVED_KWARGS


def conflicts(config: PromptConfig) -> Iterator[tuple[str, str]]:
    """Keys of the job file that cannot be honoured, each with why.

    Yields:
        The key, like ``prompt.system``, and the rest of a sentence about it.
    """
    if config.messages is not None and not config.messages:
        yield "prompt.messages", "is empty; give at least one message"
    if config.template is not None and not config.template.strip():
        yield "prompt.template", "is empty; write what the prompt should say, like '{{ text }}'"
    if taken := sorted(RESERVED_KWARGS & set(config.chat_template_kwargs)):
        yield (
            "prompt.chat_template_kwargs",
            f"cannot hold {', '.join(taken)}, which every job sets itself",
        )
    if config.token_ids_column is not None:
        for name, given in _of_text(config).items():
            if given:
                why = "cannot be combined with prompt.token_ids_column, which brings finished ids"
                yield f"prompt.{name}", why
    elif config.chat_template == "none":
        for name, given in _of_chat(config).items():
            if given:
                yield f"prompt.{name}", "needs a chat template, but prompt.chat_template is none"


def _of_chat(config: PromptConfig) -> dict[str, bool]:
    """What only a chat template can honour, and whether it is given."""
    return {
        "system": config.system is not None,
        "messages": config.messages is not None,
        "chat_template_kwargs": bool(config.chat_template_kwargs),
    }


def _of_text(config: PromptConfig) -> dict[str, bool]:
    """What makes text of a row, or tokens of a text, and whether it is given."""
    return {
        "system": config.system is not None,
        "chat_template": config.chat_template not in ("auto", "none"),
        "chat_template_kwargs": bool(config.chat_template_kwargs),
        "parse_special_tokens": config.parse_special_tokens,
    }
