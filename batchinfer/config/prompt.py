"""How a row becomes a prompt, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from batchinfer.typed import take_types


@dataclass(frozen=True)
class PromptConfig:
    """How a row becomes a prompt. One source; default: column ``messages``, else ``prompt``.

    Raises:
        TypeError: naming the field, when a value is of another type.
        ValueError: naming the field, when more than one source is given.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    column: str | None = None
    """A column of strings, or of conversations: list<struct<role, content>>."""
    template: str | None = None
    """Jinja2 over the row's columns, run in a sandbox."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """A conversation: role and content, the content being a template like ``template``."""
    token_ids_column: str | None = None
    """A column of token ids: list<int>."""
    adapter_column: str | None = None
    """A column of names of ``model.adapters``; null runs the base model."""
    system: str | None = None
    """Put before the conversation as its system message (a template like ``template``)."""
    chat_template: str = "auto"
    """auto, none, or the path of a template file. auto: messages use the model's template; a
    string becomes one user message if the tokenizer has a template, else it is taken raw."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the chat template, e.g. {enable_thinking: false}."""
    parse_special_tokens: bool = False
    """false: control tokens such as <|im_end|> inside row text stay text."""
    on_too_long: Literal["error", "truncate_left", "truncate_right"] = "error"
    """What to do with a prompt that leaves no room for an output token."""

    def __post_init__(self) -> None:
        take_types(self)
        sources = ("column", "template", "messages", "token_ids_column")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one source of the prompt, not {' and '.join(given)}")
