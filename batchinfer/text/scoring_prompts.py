"""Builds prompts with completions to score.

Prompt and completion are separated as in EleutherAI's lm-evaluation-harness (``_encode_pair`` in
lm_eval/api/model.py), so that scores are comparable. Whitespace at the end of the prompt belongs to
the completion. Prompt and completion are tokenized as one text. If the prompt alone has n tokens,
the tokens after the first n belong to the completion. All completions of a row can thus share the
prompt's tokens. A prompt that is scored itself starts with the beginning-of-sequence token, as in
``loglikelihood_rolling``, unless the prompt comes from a chat template. A model without that token
uses its end-of-sequence token instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError
from batchinfer.text.control_tokens import Marks
from batchinfer.text.prompt_sources import require_column
from batchinfer.text.prompts import Prompt, PromptTooLongError, RowValues, or_error
from batchinfer.text.render import RowRenderer
from batchinfer.text.row_values import decoded, row_token_ids
from batchinfer.text.tokenize_rows import RenderedText, TextEncoder
from batchinfer.text.tokenizer import TokenIds, Tokenizer

_EMPTY = "empty_completion"


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPrompt(Prompt):
    """A prompt with completions to score; without completions, the prompt itself is scored."""

    completions: tuple[TokenIds, ...] = ()

    @property
    def num_tokens_after(self) -> int:
        """Number of tokens to compute after the prompt: all except the last of each completion."""
        return sum(len(completion) - 1 for completion in self.completions)


class ScoringBuilder:
    """Builds prompts with completions from rows. Thread-safe.

    Args:
        completions_column: column of the completions; None to score the prompts themselves.
        max_model_len: maximum number of tokens of a prompt and its longest completion together.
        options: options of ``RowRenderer``, whose errors this class also raises.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Tokenizer,
        *,
        completions_column: str | None,
        columns: Sequence[str],
        max_model_len: int,
        **options: Any,
    ) -> None:
        if completions_column is not None:
            require_column(completions_column, "score.completions_column", columns)
        self._max_model_len = max_model_len
        self._on_too_long = config.on_too_long
        self._prefix_token_id = tokenizer.prefix_token_id
        self._control = None if config.parse_special_tokens else tokenizer.control
        self._encoder = TextEncoder(tokenizer, parse_special_tokens=config.parse_special_tokens)
        self._completions = completions_column
        self._renderer = RowRenderer(
            config, tokenizer, columns=columns, appended_column=completions_column, **options
        )
        self.columns = self._renderer.columns

    def build(self, rows: Sequence[RowValues]) -> list[Prompt | RowError]:
        """Return a ``ScoredPrompt`` or an error for each row, in order.

        Error codes: ``empty_completion``, and the codes of ``PromptBuilder.build``.
        """
        return self.tokenize(self.render(rows))

    def render(self, rows: Sequence[RowValues]) -> list[_Draft | RowError]:
        """Do the first step of ``build``: return the rows' texts, or their errors."""
        return [or_error(self._draft, row) for row in rows]

    def tokenize(self, drafts: Sequence[_Draft | RowError]) -> list[Prompt | RowError]:
        texts = [text for draft in drafts if isinstance(draft, _Draft) for text in draft.texts]
        encoded = iter(self._encoder.encode(texts))
        return [
            draft if isinstance(draft, RowError) else or_error(self._finish, (draft, encoded))
            for draft in drafts
        ]

    def _draft(self, row: RowValues) -> _Draft:
        rendered = self._renderer.render(row)
        completions = self._read_completions(row)
        are_texts = bool(completions) and isinstance(completions[0], str)
        if not isinstance(rendered, RenderedText):
            if are_texts:
                return _Draft([self._marked(text) for text in completions], rendered)
            return _Draft([], rendered, completions)
        if are_texts:
            mark = (lambda text: text) if rendered.marks is None else rendered.marks.mark
            texts = [rendered.text.rstrip(), *(rendered.text + mark(one) for one in completions)]
            return _Draft([replace(rendered, text=text) for text in texts], whole=rendered.restored)
        is_scored = not completions and rendered.add_special_tokens
        prefix = self._prefix_token_id if is_scored else None
        return _Draft([rendered], None, completions, prefix, rendered.restored)

    def _marked(self, text: str) -> RenderedText:
        if self._control is None or not self._control.can_form_in(text):
            return RenderedText(text, False, None, False)
        marks = Marks(self._control, [text])
        return RenderedText(marks.mark(text), False, marks, self._control.occur_in(text))

    def _read_completions(self, row: RowValues) -> tuple[Any, ...]:
        """Return a row's completions, all as texts or all as token ids; empty if no column is set.

        Raises:
            RowError: ``empty_completion``, ``invalid_utf8``, ``unsupported_content``,
                ``row_too_large``.
        """
        if self._completions is None:
            return ()
        where = f"column {self._completions}"
        value = decoded(row.get(self._completions), self._completions)
        items = [value] if isinstance(value, str) else value
        if items is None or (isinstance(items, list) and not items):
            raise RowError(_EMPTY, f"{where} holds no completions")
        if not isinstance(items, list):
            raise RowError("unsupported_content", f"{where} is not a list of completions")
        for at, item in enumerate(items):
            if item is None or (isinstance(item, str | list) and not item):
                raise RowError(_EMPTY, f"{where}: completion {at} is empty")
        are_texts = {isinstance(item, str) for item in items}
        if are_texts == {True}:
            return tuple(items)
        if True in are_texts:
            raise RowError("unsupported_content", f"{where} holds both texts and other values")
        return tuple(
            row_token_ids(item, f"{where}: completion {at}", self._renderer.vocab_size)
            for at, item in enumerate(items)
        )

    def _finish(self, given: tuple[_Draft, Iterator[TokenIds | RowError]]) -> ScoredPrompt:
        draft, encoded = given
        results = [next(encoded) for _ in draft.texts]  # take all results, even if one is an error
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
            raise RowError(
                "empty_prompt",
                "the prompt has only one token, which cannot be scored, because no token precedes "
                "it",
            )
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
    texts: list[RenderedText]
    """The prompt if it is text, then the completions if they are text. If both are text, each
    completion is preceded by the prompt."""
    ids: TokenIds | None = None
    """Token ids of the prompt, if the row has token ids."""
    completion_ids: tuple[TokenIds, ...] = ()
    """Token ids of the completions, if the row has token ids."""
    prefix_token_id: int | None = None
    """Token to put before a text prompt that does not begin with this token; None: no token."""
    whole: str | None = None
    """Text of the prompt, including the whitespace at its end."""

    def prompt(self, ids: list[TokenIds]) -> ScoredPrompt:
        has_control = any(text.has_control_text for text in self.texts)
        if self.ids is not None:
            completions = self.completion_ids or tuple(ids)
            return ScoredPrompt(self.ids, self.whole, False, has_control, completions)
        first, *wholes = ids
        if self.prefix_token_id is not None and len(first) and first[0] != self.prefix_token_id:
            first = np.concatenate([np.array([self.prefix_token_id], dtype=np.int32), first])
        # Copy the completions' tokens, so that the whole arrays, which are mostly prompt, can be
        # freed.
        ends = tuple(whole[len(first) :].copy() for whole in wholes)
        return ScoredPrompt(first, self.whole, False, has_control, self.completion_ids or ends)
