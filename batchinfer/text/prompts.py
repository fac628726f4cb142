"""Rows to prompts: render each row, tokenize a batch at a time, check the length."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, TypeVar

import numpy as np

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError, UsageError
from batchinfer.text.chat import FinalMessage
from batchinfer.text.encode import RenderedText, TextEncoder, each_apart_if_needed
from batchinfer.text.prompt_sources import conflicts, require_column
from batchinfer.text.render import RowRenderer
from batchinfer.text.tokenizer import TokenIds, Tokenizer

RowValues = Mapping[str, object]
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A tokenized row, ready for the engine."""

    token_ids: TokenIds
    text: str | None
    """The text before any truncation; None if the row brought token ids."""
    truncated: bool
    has_control_text: bool
    """The row's text contained the text of a control token, which stayed plain text."""
    first_segment: int | None = field(default=None, kw_only=True)
    """Number of tokens of the first text of a pair, by the tokenizer; None: not a pair."""
    unpooled: int = field(default=0, kw_only=True)
    """Leading tokens that pooling leaves out."""

    @property
    def num_tokens_after(self) -> int:
        """Number of given tokens computed after the prompt, such as completions to score."""
        return 0

    def __reduce__(self) -> tuple[Any, ...]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        # Bytes: an array's own pickle takes seven times as long.
        return _unpickled, (type(self), {**values, "token_ids": self.token_ids.tobytes()})


def _unpickled(kind: type[Prompt], values: dict[str, Any]) -> Prompt:
    return kind(**{**values, "token_ids": np.frombuffer(values["token_ids"], dtype=np.int32)})


Rendered = RenderedText | Prompt | RowError
"""A row's text, the prompt of a row that brings token ids, or an error."""


class PromptTooLongError(RowError):
    """The prompt leaves no room for an output token."""

    def __init__(self, num_tokens: int, most: int, what: str = "the prompt has") -> None:
        super().__init__("prompt_too_long", f"{what} {num_tokens} tokens, over {most}")
        self.num_tokens, self.most, self.what = num_tokens, most, what

    def __reduce__(self) -> tuple[type[RowError], tuple[Any, ...]]:
        return PromptTooLongError, (self.num_tokens, self.most, self.what)


class PromptBuilder:
    """Builds prompts from rows, as ``PromptConfig`` says. Thread-safe."""

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        columns: Sequence[str],
        conversation_columns: Collection[str] = (),
        chat_template_source: str | None = None,
        vocab_size: int | None = None,
        now: datetime | None = None,
        final_message: FinalMessage = "auto",
        variables_column: str | None = None,
    ) -> None:
        """Resolve the source of the prompts.

        Args:
            max_model_len: most tokens of prompt and output together.
            columns: of the data.
            conversation_columns: columns that contain conversations, if known. A missing chat
                template is then found here, and not for each row.
            chat_template_source: content of the file that ``config.chat_template`` names.
            vocab_size: token ids of rows are below it; default: the tokenizer's.
            now: time for chat templates, the same for all rows; default: the time of this call.
            final_message: what follows a conversation.
            variables_column: a column with a row's own ``config.chat_template_kwargs``, which
                override those of the job.

        Raises:
            UsageError: settings contradict each other or the columns.
            DataError: a column is missing.
            ModelError: the tokenizer's chat template is invalid, or missing where it is needed.
        """
        for key, problem in conflicts(config):
            raise UsageError(f"{key} {problem}")
        self._max_tokens = max_model_len - 1
        self._on_too_long = config.on_too_long
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._encoder = TextEncoder(tokenizer, parse_special_tokens=config.parse_special_tokens)
        self._renderer = None
        if config.token_ids_column is not None:
            require_column(config.token_ids_column, "prompt.token_ids_column", columns)
            self.columns: tuple[str, ...] = (config.token_ids_column,)
            """The input columns that ``build`` needs."""
            return
        self._renderer = RowRenderer(
            config,
            tokenizer,
            columns=columns,
            conversation_columns=conversation_columns,
            chat_template_source=chat_template_source,
            now=now or datetime.now(),
            final_message=final_message,
            variables_column=variables_column if variables_column in columns else None,
        )
        self.columns = self._renderer.columns

    def build(self, rows: Sequence[RowValues]) -> list[Prompt | RowError]:
        """Return a prompt or an error for each row, in order.

        Text may be ``str`` or UTF-8 ``bytes``. A value that is a ``RowError``, because it could not
        be read, becomes the row's error.

        Error codes: ``empty_prompt``, ``prompt_too_long``, ``invalid_utf8``, ``template_error``,
        ``unsupported_content``, ``row_too_large``.
        """
        return self.tokenize(self.render(rows))

    def start(self, rows: Sequence[RowValues]) -> Callable[[], list[Prompt | RowError]]:
        """Build prompts immediately; other builders with this method build in the background."""
        built = self.build(rows)
        return lambda: built

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]:
        """Do the first half of ``build``: return the rows' texts, or their errors."""
        return [or_error(self._render, row) for row in rows]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]:
        """Do the second half of ``build``."""
        texts = [item for item in rendered if isinstance(item, RenderedText)]
        encoded = iter(self._encoder.encode(texts))
        return [
            self._fitted(_prompt(item, next(encoded)) if isinstance(item, RenderedText) else item)
            for item in rendered
        ]

    def _render(self, row: RowValues) -> RenderedText | Prompt:
        if self._renderer is not None:
            return self._renderer.render(row)
        name = self.columns[0]
        ids = row_token_ids(row.get(name), f"column {name}", self._vocab_size)
        return Prompt(ids, None, truncated=False, has_control_text=False)

    def _fitted(self, prompt: Prompt | RowError) -> Prompt | RowError:
        """Cut or refuse a prompt that leaves no room for an output token."""
        if isinstance(prompt, RowError):
            return prompt
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
    """Makes prompts of plain texts: no template, special tokens parsed, any length.

    Replaces a ``PromptBuilder`` for rows whose column ``text`` is valid Unicode.
    """

    columns: tuple[str, ...] = ("text",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, rows: Sequence[Mapping[str, str]]) -> list[str]:
        """Return the texts."""
        return [row["text"] for row in rows]

    def tokenize(self, texts: Sequence[str]) -> list[Prompt | RowError]:
        """Return a prompt for each text, or ``unsupported_content`` if the tokenizer refuses it."""
        encoded = each_apart_if_needed(self._encode, texts)
        return [
            ids if isinstance(ids, RowError) else Prompt(ids, text, False, False)
            for ids, text in zip(encoded, texts, strict=True)
        ]

    def _encode(self, texts: Sequence[str]) -> list[TokenIds]:
        return self._tokenizer.encode_batch(
            texts, add_special_tokens=True, parse_special_tokens=True
        )


def row_token_ids(value: object, where: str, vocab_size: int) -> TokenIds:
    """Return a row's own token ids, int32.

    Raises:
        RowError: ``empty_prompt`` without ids, ``unsupported_content`` for anything but ids.
    """
    if value is None or (isinstance(value, list | tuple | np.ndarray) and len(value) == 0):
        raise RowError("empty_prompt", f"{where} holds no token ids")
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of different lengths
        ids = np.empty(0, dtype=np.object_)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RowError("unsupported_content", f"{where} is not a list of integers")
    if ids.min() < 0 or ids.max() >= vocab_size:
        reason = f"token ids must be 0 to {vocab_size - 1}"
        raise RowError("unsupported_content", f"{where}: {reason}")
    return ids.astype(np.int32)


def _prompt(rendered: RenderedText, encoded: TokenIds | RowError) -> Prompt | RowError:
    if isinstance(encoded, RowError):
        return encoded
    return Prompt(encoded, rendered.restored, False, rendered.has_control_text)


def or_error(function: Callable[[_Argument], _Result], row: _Argument) -> _Result | RowError:
    """Return what ``function`` returns, or the ``RowError`` it raises."""
    try:
        return function(row)
    except RowError as error:
        return error
