"""Settings of prompts, and of the filter that keeps samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batchinfer.config.regex import has_match
from batchinfer.config.sampling import MAX_SAMPLES, SamplingParams
from batchinfer.config.settings_base import Record, coerce_fields
from batchinfer.config.structured import schema_text


@dataclass(frozen=True)
class PromptConfig(Record):
    """How to make a prompt from a row. Set at most one source: column, template, messages or
    token_ids_column. The default source is the column ``messages``, or the column ``prompt`` if
    there is no column ``messages``."""

    column: str | None = None
    """A column of strings, or of conversations: list<struct<role, content>>."""
    template: str | None = None
    """A Jinja2 template that uses the row's columns, rendered in a sandbox."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """A conversation: messages with a ``role`` and a ``content``. Each content is a template like
    ``template``."""
    token_ids_column: str | None = None
    """A column of token ids: list<int>."""
    images: str | tuple[str, ...] | None = None
    """A column of images, or a list of such columns, for vision-language models. A cell holds the
    bytes of an image (binary), a path below input.media_root or a data: URL (text), a
    struct<bytes, path>, a list of these, or null. The images go to the image parts of the
    conversation, in order. If the conversation has no image parts, the images go before the text of
    the first user message."""
    max_image_pixels: int = 89_478_485
    """Largest number of pixels of an image. A row with a larger image fails with invalid_image."""
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model's image processor, e.g. {size: {shortest_edge: 65536, longest_edge:
    1003520}}."""
    adapter: str | None = None
    """Name of an adapter in ``model.adapters``, for all rows. null: the base model."""
    adapter_column: str | None = None
    """A column with the name of each row's adapter in ``model.adapters``. null: the base model."""
    system: str | None = None
    """System message of the conversation (a template like ``template``)."""
    chat_template: str = "auto"
    """auto, none, or the path of a template file. auto: conversations use the model's template; a
    string becomes one user message if the tokenizer has a template, otherwise a raw prompt. none:
    strings are raw prompts."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, e.g. {enable_thinking: false}."""
    tools: tuple[Mapping[str, Any], ...] | str | None = None
    """Tools that the model may call, in OpenAI's form: a list of {type: function, function: {name,
    description, parameters}}, or the path of a JSON file with such a list. The chat template writes
    the tools into the prompt."""
    tools_column: str | None = None
    """A column with each row's own tools: the list as JSON text, or list<struct>. A row with null
    has no tools."""
    tool_choice: str | Mapping[str, Any] = "auto"
    """auto: the model may call tools. none: the model sees no tools. required: the model must call
    a tool. {type: function, function: {name: ...}}: the model must call this tool."""
    parse_special_tokens: bool = False
    """Parse control tokens such as <|im_end|> in the text of rows. false: such text stays plain."""
    on_too_long: Literal["error", "truncate_left", "truncate_right"] = "error"
    """What to do with a prompt that leaves no room for an output token."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        sources = ("column", "template", "messages", "token_ids_column")
        used = [name for name in sources if getattr(self, name) is not None]
        if len(used) > 1:
            raise ValueError(f"give only one source of the prompt, not {' and '.join(used)}")
        self._require("max_image_pixels", self.max_image_pixels > 0, "positive")
        if self.tools is not None and self.tools_column is not None:
            raise ValueError("give tools or tools_column, not both")
        if self.tool_choice not in ("auto", "none") and not self.has_tools:
            raise ValueError("tool_choice needs tools or tools_column")
        if self.adapter is not None and self.adapter_column is not None:
            raise ValueError("give adapter (for all rows) or adapter_column, not both")

    @property
    def image_columns(self) -> tuple[str, ...]:
        """Columns of images."""
        if self.images is None:
            return ()
        return (self.images,) if isinstance(self.images, str) else self.images

    @property
    def has_tools(self) -> bool:
        """True if rows have tools that the model may call."""
        is_given = self.tools is not None or self.tools_column is not None
        return is_given and self.tool_choice != "none"


@dataclass(frozen=True)
class AcceptConfig(Record):
    """Draw samples of a row until enough samples pass, or until ``max_tries`` samples are drawn.

    The filter checks samples in the order of their indices and keeps the first samples that pass,
    so its choice does not depend on the other rows of a batch.
    """

    regex: str | None = None
    """RE2 pattern that must match a part of the text; ^ and $ anchor it. Look-around and
    back-references are not available."""
    schema: Mapping[str, Any] | str | None = None
    """JSON schema (or its JSON text) that the text must conform to."""
    min_tokens: int = 0
    """Smallest number of tokens in an accepted sample, including the token that ends it."""
    k: int | None = None
    """Number of samples to keep for each row. null: sampling.n. A row's own n overrides this number
    if it is greater than 1."""
    max_tries: int = 16
    """Largest number of samples to draw for a row."""
    dedup: bool = False
    """Keep only the first of a row's samples with the same text."""

    def __post_init__(self) -> None:
        if isinstance(self.schema, Mapping):
            object.__setattr__(self, "schema", schema_text("schema", self.schema))
        coerce_fields(self)
        if isinstance(self.schema, str):
            object.__setattr__(self, "schema", schema_text("schema", self.schema))
        if self.regex is not None:
            try:
                has_match(self.regex, "")
            except ValueError as error:
                raise ValueError(f"regex is not valid: {error}") from None
        self._require("min_tokens", 0 <= self.min_tokens < 2**31, "from 0 to 2**31 - 1")
        most = f"from 1 to {MAX_SAMPLES}"
        self._require("k", self.k is None or 1 <= self.k <= MAX_SAMPLES, most)
        self._require("max_tries", 1 <= self.max_tries <= MAX_SAMPLES, most)
        if self.k is not None and self.k > self.max_tries:
            raise ValueError(
                f"k is {self.k}; it must be at most max_tries, which is {self.max_tries}"
            )

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError if a row's parameter conflicts with the filter; the message names it."""
        if params.beam_width is not None:
            raise ValueError("beam_width cannot be combined with accept")
        if params.n > self.max_tries:
            raise ValueError(
                f"n is {params.n}; it must be at most accept.max_tries, which is {self.max_tries}"
            )

    def wanted(self, n: int) -> int:
        """Return the number of samples to keep for a row that requests ``n`` samples."""
        return n if n > 1 or self.k is None else self.k
