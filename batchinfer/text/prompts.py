"""Rows to prompts: render each, tokenize a batch at a time, check the length."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol, TypeVar

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
    """What was tokenized, before any truncation; None for a row that brought token ids."""
    truncated: bool
    has_control_text: bool
    """The row's text held a control token's text, which was kept plain text."""
    first_segment: int | None = field(default=None, kw_only=True)
    """Of a pair of texts: tokens that the tokenizer counts to the first; None: there is one."""

    unpooled: int = field(default=0, kw_only=True)
    """Tokens that it begins with and that an embedding leaves out."""

    @property
    def num_tokens_after(self) -> int:
        """Tokens that are computed after it and given with it."""
        return 0

    def __reduce__(self) -> tuple[Any, ...]:
        ids = self.token_ids.tobytes()  # an array's own pickle takes seven times as long
        kind = self.truncated, self.has_control_text
        return _unpickled, (ids, self.text, *kind, self.first_segment, self.unpooled)


def _unpickled(
    ids: bytes,
    text: str | None,
    truncated: bool,
    has_control_text: bool,
    first_segment: int | None,
    unpooled: int,
) -> Prompt:
    return Prompt(
        np.frombuffer(ids, dtype=np.int32),
        text,
        truncated,
        has_control_text,
        first_segment=first_segment,
        unpooled=unpooled,
    )


Rendered = RenderedText | Prompt | RowError
"""A row's text; of a row that brings token ids, its prompt; or its error."""


class PromptTooLongError(RowError):
    """A row whose prompt leaves no room for an output token."""

    def __init__(self, num_tokens: int, most: int, what: str = "the prompt has") -> None:
        super().__init__("prompt_too_long", f"{what} {num_tokens} tokens, over {most}")
        self.num_tokens, self.most, self.what = num_tokens, most, what

    def __reduce__(self) -> tuple[type[RowError], tuple[Any, ...]]:
        return PromptTooLongError, (self.num_tokens, self.most, self.what)


class PromptBuilder:
    """Builder of prompts from rows, as ``PromptConfig`` says. Thread-safe."""

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
        """Resolve where prompts come from.

        Args:
            max_model_len: most tokens of prompt and output together.
            conversation_columns: those of them that hold conversations, if that is known; then
                a missing chat template is found here, not in every row.
            chat_template_source: content of the file that ``config.chat_template`` names.
            vocab_size: ids that rows may bring are below it; default the tokenizer's.
            now: what chat templates are told the time is, equal for all rows; default this call's.
            final_message: what comes after a conversation.
            variables_column: one of the columns, which holds a row's own
                ``config.chat_template_kwargs``; they win over those of all rows.

        Raises:
            UsageError: the configuration does not go together, or not with these columns.
            DataError: the data does not have the column.
            ModelError: the tokenizer's chat template is invalid, or missing where it is needed.
        """
        for key, problem in conflicts(config):
            raise UsageError(f"{key} {problem}")
        self._max_tokens = max_model_len - 1
        self._on_too_long = config.on_too_long
        self._reader: _Reader
        if config.token_ids_column is not None:
            self._reader = _TokenIdsReader(config, columns, vocab_size or tokenizer.vocab_size)
        else:
            renderer = RowRenderer(
                config,
                tokenizer,
                columns=columns,
                conversation_columns=conversation_columns,
                chat_template_source=chat_template_source,
                now=now or datetime.now(),
                final_message=final_message,
                variables_column=variables_column if variables_column in columns else None,
            )
            encoder = TextEncoder(tokenizer, parse_special_tokens=config.parse_special_tokens)
            self._reader = _TextReader(renderer, encoder)

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns that ``build`` needs."""
        return self._reader.columns

    def build(self, rows: Sequence[RowValues]) -> list[Prompt | RowError]:
        """A prompt or an error for each row, in order. Text may be ``str`` or UTF-8 ``bytes``; a
        value that could not be read is a ``RowError``, which becomes the row's.

        Error codes: ``empty_prompt``, ``prompt_too_long``, ``invalid_utf8``, ``template_error``,
        ``unsupported_content``, ``row_too_large``.
        """
        return self.tokenize(self.render(rows))

    def start(self, rows: Sequence[RowValues]) -> Callable[[], list[Prompt | RowError]]:
        """As those begin who ``build`` elsewhere; here it is done at once."""
        built = self.build(rows)
        return lambda: built

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]:
        """The first half of ``build``: the rows' texts, or their errors."""
        return self._reader.render(rows)

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]:
        """The second half of ``build``."""
        return [self._fitted(prompt) for prompt in self._reader.tokenize(rendered)]

    def _fitted(self, prompt: Prompt | RowError) -> Prompt | RowError:
        """Leave room for one output token; cut or refuse a prompt that does not."""
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
    """Makes prompts of texts as they are: no template, special tokens parsed, any length.

    In place of a ``PromptBuilder``, for rows whose column ``text`` is valid Unicode.
    """

    columns: tuple[str, ...] = ("text",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, rows: Sequence[Mapping[str, str]]) -> list[str]:
        """The texts."""
        return [row["text"] for row in rows]

    def tokenize(self, texts: Sequence[str]) -> list[Prompt | RowError]:
        """A prompt for each; ``unsupported_content`` where the tokenizer refuses it."""
        encoded = each_apart_if_needed(self._encode, texts)
        return [
            ids if isinstance(ids, RowError) else Prompt(ids, text, False, False)
            for ids, text in zip(encoded, texts, strict=True)
        ]

    def _encode(self, texts: Sequence[str]) -> list[TokenIds]:
        return self._tokenizer.encode_batch(
            texts, add_special_tokens=True, parse_special_tokens=True
        )


class _Reader(Protocol):
    columns: tuple[str, ...]

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]: ...
    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]: ...


class _TextReader:
    """Rows that hold text."""

    def __init__(self, renderer: RowRenderer, encoder: TextEncoder) -> None:
        self.columns = renderer.columns
        self._renderer = renderer
        self._encoder = encoder

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]:
        return [or_error(self._renderer.render, row) for row in rows]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]:
        texts = [item for item in rendered if isinstance(item, RenderedText)]
        encoded = iter(self._encoder.encode(texts))
        return [
            _prompt(item, next(encoded)) if isinstance(item, RenderedText) else item
            for item in rendered
        ]


class _TokenIdsReader:
    """Rows that bring token ids, list<int>."""

    def __init__(self, config: PromptConfig, columns: Sequence[str], vocab_size: int) -> None:
        assert config.token_ids_column is not None
        require_column(config.token_ids_column, "prompt.token_ids_column", columns)
        self.columns: tuple[str, ...] = (config.token_ids_column,)
        self._vocab_size = vocab_size

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]:
        return [or_error(self._read_row, row) for row in rows]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]:
        return [item for item in rendered if not isinstance(item, RenderedText)]

    def _read_row(self, row: RowValues) -> Prompt:
        name = self.columns[0]
        ids = row_token_ids(row.get(name), f"column {name}", self._vocab_size)
        return Prompt(ids, None, truncated=False, has_control_text=False)


def row_token_ids(value: object, where: str, vocab_size: int) -> TokenIds:
    """Token ids that a row brings, int32.

    Raises:
        RowError: ``empty_prompt`` for none, ``unsupported_content`` for what is no list of them.
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
    """What ``function`` returns, or the ``RowError`` it raises."""
    try:
        return function(row)
    except RowError as error:
        return error
