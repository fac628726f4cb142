"""Makes prompts from rows: renders each row, tokenizes a batch at a time, checks lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError
from batchinfer.text.images.image_placeholders import ImageSettings, RowImage
from batchinfer.text.render import RowRenderer
from batchinfer.text.tokenize_rows import RenderedText, TextEncoder, each_apart_if_needed
from batchinfer.text.tokenizer import TokenIds, Tokenizer

ANY_LENGTH = 2**31
"""Value of ``max_model_len`` that turns a builder's length check off; the engine then refuses
prompts that are too long."""
RowValues = Mapping[str, object]
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A tokenized row, ready for the engine."""

    token_ids: TokenIds
    text: str | None
    """Text of the prompt before any truncation; None if the row has token ids."""
    truncated: bool
    has_control_text: bool
    """True if the row's text contains the text of a control token, which stays plain text."""
    first_segment: int | None = field(default=None, kw_only=True)
    """Number of tokens that the tokenizer assigns to the first text of a pair; None if there is no
    pair."""
    unpooled: int = field(default=0, kw_only=True)
    """Number of leading tokens that pooling leaves out."""
    images: tuple[RowImage, ...] = field(default=(), kw_only=True)
    """Images, in the order of their tokens, which have negative ids."""
    embeds: npt.NDArray[np.uint8] | None = field(default=None, kw_only=True)
    """[tokens, bytes of a vector] embeddings in the model's dtype, if the prompt is given as
    embeddings. The token ids of such a prompt are negative."""

    @property
    def vocabulary_ids(self) -> TokenIds:
        """Token ids. The vocabulary's id of the image token replaces the negative ids of images,
        and 0 replaces the negative ids of embeddings, as in vLLM."""
        if not self.images:
            return np.maximum(self.token_ids, 0)
        return np.where(self.token_ids < 0, np.int32(self.images[0].token_id), self.token_ids)

    @property
    def num_tokens_after(self) -> int:
        """Number of known tokens that follow the prompt, such as completions to score."""
        return 0

    def __reduce__(self) -> tuple[Any, ...]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        # Bytes, because pickling an array takes seven times as long.
        return _unpickled, (type(self), {**values, "token_ids": self.token_ids.tobytes()})


def _unpickled(kind: type[Prompt], values: dict[str, Any]) -> Prompt:
    return kind(**{**values, "token_ids": np.frombuffer(values["token_ids"], dtype=np.int32)})


Rendered = RenderedText | TokenIds | RowError
"""A row's text, its token ids, or its error."""


class PromptTooLongError(RowError):
    """The prompt leaves no room for an output token."""

    def __init__(self, num_tokens: int, most: int, what: str = "the prompt has") -> None:
        super().__init__(
            "prompt_too_long", f"{what} {num_tokens} tokens; at most {most} fit in max_model_len"
        )
        self.num_tokens, self.most, self.what = num_tokens, most, what

    def __reduce__(self) -> tuple[type[RowError], tuple[Any, ...]]:
        return PromptTooLongError, (self.num_tokens, self.most, self.what)


class PromptBuilder:
    """Builds prompts from rows, as ``PromptConfig`` says. Thread-safe.

    Args:
        max_model_len: maximum number of tokens of prompt and output together.
        options: options of ``RowRenderer``, whose errors this class also raises.
    """

    def __init__(
        self, config: PromptConfig, tokenizer: Tokenizer, *, max_model_len: int, **options: Any
    ) -> None:
        self._max_tokens = max_model_len - 1
        self._on_too_long = config.on_too_long
        self._renderer = RowRenderer(config, tokenizer, **options)
        self._encoder = TextEncoder(tokenizer, parse_special_tokens=config.parse_special_tokens)
        self.columns = self._renderer.columns

    def build(self, rows: Sequence[RowValues]) -> list[Prompt | RowError]:
        """Return a prompt or an error for each row, in order.

        Text may be ``str`` or UTF-8 ``bytes``. A value that is a ``RowError``, because it could not
        be read, becomes the row's error.

        Error codes: ``empty_prompt``, ``prompt_too_long``, ``invalid_utf8``, ``template_error``,
        ``unsupported_content``, ``row_too_large``, ``invalid_image``.
        """
        return self.tokenize(self.render(rows))

    def start(self, rows: Sequence[RowValues]) -> Callable[[], list[Prompt | RowError]]:
        """Build prompts now; return a function that returns them. ``WorkerPrompts.start``, in
        contrast, builds them in the background."""
        built = self.build(rows)
        return lambda: built

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]:
        """Do the first step of ``build``: return the text, token ids or error of each row."""
        return [or_error(self._renderer.render, row) for row in rows]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]:
        """Do the second step of ``build``: tokenize texts and check lengths."""
        encoded = iter(
            self._encoder.encode([item for item in rendered if isinstance(item, RenderedText)])
        )
        prompts: list[Prompt | RowError] = []
        for item in rendered:
            ids = next(encoded) if isinstance(item, RenderedText) else item
            if isinstance(ids, RowError):
                prompts.append(ids)
            elif isinstance(item, RenderedText):
                prompts.append(or_error(self._prompt, (item, ids)))
            else:
                prompts.append(self._fitted(Prompt(ids, None, False, False)))
        return prompts

    def _prompt(self, encoded: tuple[RenderedText, TokenIds]) -> Prompt | RowError:
        item, ids = encoded
        if item.images is None:
            return self._fitted(Prompt(ids, item.restored, False, item.has_control_text))
        ids, images = item.images.with_negative_ids(ids), item.images.images
        if len(ids) > self._max_tokens:
            return PromptTooLongError(len(ids), self._max_tokens)  # an image cannot be cut
        return Prompt(ids, item.restored, False, item.has_control_text, images=images)

    def _fitted(self, prompt: Prompt) -> Prompt | RowError:
        """Cut or refuse a prompt that leaves no room for an output token."""
        ids, most = prompt.token_ids, self._max_tokens
        if len(ids) == 0:
            return RowError("empty_prompt", "the prompt has no tokens")
        if len(ids) <= most:
            return prompt
        if self._on_too_long == "error" or most == 0:
            return PromptTooLongError(len(ids), most)
        kept = ids[-most:] if self._on_too_long == "truncate_left" else ids[:most]
        return replace(prompt, token_ids=kept.copy(), truncated=True)


class RawTexts:
    """Makes prompts from plain texts of any length, without a template; parses special tokens.

    Used instead of a ``PromptBuilder`` for rows whose column ``text`` is valid Unicode.

    Args:
        images: settings for images; None if the model takes only text. With settings, a text with
            an image placeholder is an error, because these prompts have no images.
    """

    columns: tuple[str, ...] = ("text",)

    def __init__(self, tokenizer: Tokenizer, images: ImageSettings | None = None) -> None:
        self._tokenizer = tokenizer
        self._placeholder = None if images is None else images.placeholder()

    def render(self, rows: Sequence[Mapping[str, str]]) -> list[str]:
        return [row["text"] for row in rows]

    def tokenize(self, texts: Sequence[str]) -> list[Prompt | RowError]:
        """Return a prompt for each text, or ``unsupported_content`` if the text has an image
        placeholder or the tokenizer refuses the text."""
        encoded = each_apart_if_needed(self._encode, texts)
        return list(map(self._prompt, texts, encoded))

    def _prompt(self, text: str, ids: TokenIds | RowError) -> Prompt | RowError:
        if self._placeholder is not None and self._placeholder in text:
            return RowError(
                "unsupported_content",
                f"the text has {text.count(self._placeholder)} image placeholders "
                f"({self._placeholder}), but the prompt has no images; give them in "
                "multi_modal_data, or remove the placeholders from the text",
            )
        return ids if isinstance(ids, RowError) else Prompt(ids, text, False, False)

    def _encode(self, texts: Sequence[str]) -> list[TokenIds]:
        return self._tokenizer.encode_batch(
            texts, add_special_tokens=True, parse_special_tokens=True
        )


def or_error(function: Callable[[_Argument], _Result], row: _Argument) -> _Result | RowError:
    """Return what ``function`` returns, or the ``RowError`` it raises."""
    try:
        return function(row)
    except RowError as error:
        return error
