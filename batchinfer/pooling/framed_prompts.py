"""Truncates long prompts of pooling models, and keeps the special tokens around the text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError
from batchinfer.text.prompts import Prompt, PromptBuilder
from batchinfer.text.tokenizer import Tokenizer


class FramedPromptBuilder(PromptBuilder):
    """Builds prompts, and truncates long texts without removing special tokens ([CLS], [SEP], ...).

    In a prompt given as token ids, no tokens count as special tokens. A pooled prompt may have
    ``max_model_len`` tokens, because no tokens follow it.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        **others: Any,
    ) -> None:
        super().__init__(config, tokenizer, max_model_len=max_model_len + 1, **others)
        self._frame = frame_of(tokenizer)

    def _fitted(self, prompt: Prompt) -> Prompt | RowError:
        fitted = super()._fitted(prompt)
        if isinstance(fitted, RowError) or not fitted.truncated:
            return fitted
        frame = (0, 0) if prompt.text is None else self._frame
        left = self._on_too_long == "truncate_left"
        return cut_in_frame(prompt, len(fitted.token_ids), frame, left=left)


def cut_in_frame(
    prompt: Prompt, most: int, frame: tuple[int, int], *, left: bool = False
) -> Prompt:
    """Truncate a prompt to ``most`` tokens.

    Args:
        frame: numbers of special tokens before and after a text. Special tokens stay if they fit.
        left: True to cut the start instead of the end.
    """
    ids = prompt.token_ids
    before, after = frame if sum(frame) < most else (0, 0)
    end, room = len(ids) - after, most - before - after
    kept = ids[end - room : end] if left else ids[before : before + room]
    whole = np.concatenate([ids[:before], kept, ids[end:]])
    return replace(prompt, token_ids=whole, truncated=True)


def frame_of(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the numbers of special tokens that the tokenizer puts before and after a text."""
    framed, plain = (
        tokenizer.encode_batch(["a"], add_special_tokens=with_them, parse_special_tokens=False)[0]
        for with_them in (True, False)
    )
    for before in range(len(framed) - len(plain) + 1):
        if len(plain) and np.array_equal(framed[before : before + len(plain)], plain):
            return before, len(framed) - before - len(plain)
    return 0, 0
