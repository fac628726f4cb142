"""Rows to prompts with completions that are to be scored.

Where the prompt ends and a completion begins is as in EleutherAI's lm-evaluation-harness
(``_encode_pair`` in lm_eval/api/model.py), so that scores can be compared: whitespace at the end of
the prompt belongs to the completion; prompt and completion are tokenized as one text; the
completion's tokens are those after as many as the prompt alone has. All completions of a row thus
have the prompt's own tokens in common. A prompt that is itself scored is, as in its
``loglikelihood_rolling``, put behind the beginning-of-sequence token (or, where the model has
none, its end-of-sequence token) unless it has it already or comes from a chat template.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

import numpy as np

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError, UsageError
from batchinfer.text.control_tokens import Marks
from batchinfer.text.encode import RenderedText, TextEncoder
from batchinfer.text.prompt_sources import conflicts, require_column
from batchinfer.text.prompts import Prompt, PromptTooLongError, RowValues, or_error, row_token_ids
from batchinfer.text.render import RowRenderer
from batchinfer.text.row_values import decoded
from batchinfer.text.tokenizer import TokenIds, Tokenizer

_EMPTY = "empty_completion"


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPrompt(Prompt):
    """A prompt and what is to be scored after it; without completions, it is itself scored."""

    completions: tuple[TokenIds, ...] = ()

    @property
    def num_tokens_after(self) -> int:
        """Tokens computed after the prompt: of each completion all but the last."""
        return sum(len(completion) - 1 for completion in self.completions)

    def __reduce__(self) -> tuple[Any, ...]:
        facts = self.token_ids, self.text, self.truncated, self.has_control_text, self.completions
        return ScoredPrompt, facts


class ScoringBuilder:
    """Builder of prompts with completions from rows. Thread-safe.

    Args:
        completions_column: holds the completions; None: prompts themselves are scored.
        others: as of ``PromptBuilder``; so are its errors.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Tokenizer,
        *,
        completions_column: str | None,
        max_model_len: int,
        columns: Sequence[str],
        conversation_columns: Collection[str] = (),
        chat_template_source: str | None = None,
        vocab_size: int | None = None,
        now: datetime | None = None,
    ) -> None:
        for key, problem in conflicts(config):
            raise UsageError(f"{key} {problem}")
        self._max_model_len = max_model_len
        self._on_too_long = config.on_too_long
        vocab_size = vocab_size or tokenizer.vocab_size
        completions = None
        if completions_column is not None:
            require_column(completions_column, "score.completions_column", columns)
            completions = _Completions(completions_column, vocab_size)
        encoder = TextEncoder(tokenizer, parse_special_tokens=config.parse_special_tokens)
        drafts: _Drafts
        if config.token_ids_column is not None:
            require_column(config.token_ids_column, "prompt.token_ids_column", columns)
            control = None if config.parse_special_tokens else tokenizer
            drafts = _TokenIdDrafts(config.token_ids_column, vocab_size, control, completions)
        else:
            renderer = RowRenderer(
                config,
                tokenizer,
                columns=columns,
                conversation_columns=conversation_columns,
                chat_template_source=chat_template_source,
                now=now or datetime.now(),
                beside=() if completions_column is None else (completions_column,),
            )
            drafts = _TextDrafts(renderer, tokenizer.prefix_token_id, completions)
        self._drafts = drafts
        self._encoder = encoder
        self.columns = drafts.columns
        """The input columns that ``build`` needs."""

    def build(self, rows: Sequence[RowValues]) -> list[Prompt | RowError]:
        """A ``ScoredPrompt`` or an error for each row, in order.

        Error codes: those of ``PromptBuilder.build`` and ``empty_completion``.
        """
        return self.tokenize(self.render(rows))

    def render(self, rows: Sequence[RowValues]) -> list[_Draft | RowError]:
        """The first half of ``build``: the rows' texts, or their errors."""
        return [or_error(self._drafts.draft, row) for row in rows]

    def tokenize(self, drafts: Sequence[_Draft | RowError]) -> list[Prompt | RowError]:
        """The second half of ``build``."""
        texts = [text for draft in drafts if isinstance(draft, _Draft) for text in draft.texts]
        encoded = iter(self._encoder.encode(texts))
        return [
            draft if isinstance(draft, RowError) else or_error(self._finish, (draft, encoded))
            for draft in drafts
        ]

    def _finish(self, given: tuple[_Draft, Iterator[TokenIds | RowError]]) -> ScoredPrompt:
        draft, encoded = given
        results = [next(encoded) for _ in draft.texts]  # all of them, whatever is wrong with one
        ids = []
        for result in results:
            if isinstance(result, RowError):
                raise result
            ids.append(result)
        return self._fitted(draft.prompt(ids))

    def _fitted(self, prompt: ScoredPrompt) -> ScoredPrompt:
        """Cut or refuse a prompt that leaves no room for its longest completion."""
        ids, longest = prompt.token_ids, max(map(len, prompt.completions), default=0)
        if len(ids) == 0:
            raise RowError("empty_prompt", "the prompt has no tokens")
        if len(ids) == 1 and not prompt.completions:
            raise RowError("empty_prompt", "the prompt has one token, and nothing before it")
        for at, completion in enumerate(prompt.completions):
            if len(completion) == 0:
                raise RowError(_EMPTY, f"completion {at} adds no token to the prompt")
        room = self._max_model_len - longest
        if len(ids) <= room:
            return prompt
        if self._on_too_long == "error" or room < 1:
            what = "the prompt and its longest completion have" if longest else "the prompt has"
            raise PromptTooLongError(len(ids) + longest, self._max_model_len, what)
        kept = ids[-room:] if self._on_too_long == "truncate_left" else ids[:room]
        return replace(prompt, token_ids=kept.copy(), truncated=True)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A row before tokenizing: its texts, and what becomes of their token ids."""

    texts: list[RenderedText]
    """Of a prompt of text, itself first; then the completions, where they are text."""
    ids: TokenIds | None = None
    """Of a prompt that brings them."""
    completion_ids: tuple[TokenIds, ...] = ()
    """Of completions that are token ids."""
    prefix_token_id: int | None = None
    """What a prompt of text is put behind."""
    whole: str | None = None
    """The prompt's text with the whitespace that completions take over."""

    def prompt(self, ids: list[TokenIds]) -> ScoredPrompt:
        """The prompt with the token ids of ``texts``."""
        text, has_control = self.whole, any(text.has_control_text for text in self.texts)
        if self.ids is not None:
            completions = self.completion_ids or tuple(ids)
            return ScoredPrompt(self.ids, text, False, has_control, completions)
        first, *others = ids
        if self.prefix_token_id is not None and len(first) and first[0] != self.prefix_token_id:
            first = np.concatenate([np.array([self.prefix_token_id], dtype=np.int32), first])
        # Not views: of each text nearly all is the prompt.
        own = tuple(whole[len(first) :].copy() for whole in others)
        return ScoredPrompt(first, text, False, has_control, self.completion_ids or own)


class _Drafts(Protocol):
    columns: tuple[str, ...]

    def draft(self, row: RowValues) -> _Draft: ...


class _TextDrafts:
    """Drafts of prompts that are text."""

    def __init__(
        self, renderer: RowRenderer, prefix: int | None, completions: _Completions | None
    ) -> None:
        self.columns = renderer.columns
        self._renderer = renderer
        self._prefix = prefix
        self._completions = completions

    def draft(self, row: RowValues) -> _Draft:
        rendered = self._renderer.render(row)
        if self._completions is None:
            prefix = self._prefix if rendered.add_special_tokens else None
            return _Draft([rendered], prefix_token_id=prefix, whole=rendered.restored)
        completions = self._completions.read(row)
        if not isinstance(completions[0], str):
            return _Draft([rendered], completion_ids=completions, whole=rendered.restored)
        context = rendered.text.rstrip()
        mark = _unchanged if rendered.marks is None else rendered.marks.mark
        texts = [context, *(rendered.text + mark(completion) for completion in completions)]
        return _Draft([replace(rendered, text=text) for text in texts], whole=rendered.restored)


class _TokenIdDrafts:
    """Drafts of prompts that are token ids; completions that are text are tokenized apart."""

    def __init__(
        self,
        column: str,
        vocab_size: int,
        marking: Tokenizer | None,
        completions: _Completions | None,
    ) -> None:
        beside = () if completions is None else (completions.column,)
        self.columns: tuple[str, ...] = (column, *beside)
        self._column = column
        self._vocab_size = vocab_size
        self._control = None if marking is None else marking.control
        self._completions = completions

    def draft(self, row: RowValues) -> _Draft:
        ids = row_token_ids(row.get(self._column), f"column {self._column}", self._vocab_size)
        if self._completions is None:
            return _Draft([], ids)
        completions = self._completions.read(row)
        if not isinstance(completions[0], str):
            return _Draft([], ids, completions)
        return _Draft([self._rendered(text) for text in completions], ids)

    def _rendered(self, text: str) -> RenderedText:
        if self._control is None or not self._control.can_form_in(text):
            return RenderedText(text, False, None, False)
        marks = Marks(self._control, [text])
        return RenderedText(marks.mark(text), False, marks, self._control.occur_in(text))


class _Completions:
    """Reader of a column of completions."""

    def __init__(self, column: str, vocab_size: int) -> None:
        self.column = column
        self._vocab_size = vocab_size

    def read(self, row: Mapping[str, object]) -> tuple[Any, ...]:
        """A row's completions, at least one: all of them texts, or all of them token ids.

        Raises:
            RowError: ``empty_completion``, ``invalid_utf8``, ``unsupported_content``,
                ``row_too_large``.
        """
        where = f"column {self.column}"
        value = decoded(row.get(self.column), self.column)
        items = [value] if isinstance(value, str) else value
        if items is None or (isinstance(items, list) and not items):
            raise RowError(_EMPTY, f"{where} holds no completions")
        if not isinstance(items, list):
            raise RowError("unsupported_content", f"{where} is no list of completions")
        for at, item in enumerate(items):
            if item is None or (isinstance(item, str | list) and not item):
                raise RowError(_EMPTY, f"{where}: completion {at} is empty")
        if all(isinstance(item, str) for item in items):
            return tuple(items)
        if any(isinstance(item, str) for item in items):
            raise RowError("unsupported_content", f"{where} holds texts and other values together")
        return tuple(
            row_token_ids(item, f"{where}: completion {at}", self._vocab_size)
            for at, item in enumerate(items)
        )


def _unchanged(text: str) -> str:
    return text
