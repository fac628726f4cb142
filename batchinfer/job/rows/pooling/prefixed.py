"""Prompts of texts that something is put before, as an embedding model was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from batchinfer.errors import RowError
from batchinfer.text.encode import RenderedText
from batchinfer.text.prompts import Prompt, PromptBuilder, Rendered, RowValues
from batchinfer.text.tokenizer import Tokenizer


class PrefixedPrompts:
    """A builder whose texts begin with ``prefix``; token ids, and what a chat template wrote, stay
    as they are.

    Args:
        unpooled: tokens that such a text begins with and that its embedding leaves out.
    """

    def __init__(self, prompts: PromptBuilder, prefix: str, unpooled: int = 0) -> None:
        self._prompts = prompts
        self._prefix = prefix
        self._unpooled = unpooled
        self.columns = prompts.columns
        """The input columns that ``render`` needs."""

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]:
        """The rows' texts, or their errors."""
        return [
            replace(item, text=self._prefix + item.text) if _begins_with_it(item) else item
            for item in self._prompts.render(rows)
        ]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]:
        """A prompt or an error for each row, in order."""
        prompts = self._prompts.tokenize(rendered)
        if not self._unpooled:
            return prompts
        return [
            self._without_prefix(prompt) if _begins_with_it(item) else prompt
            for item, prompt in zip(rendered, prompts, strict=True)
        ]

    def _without_prefix(self, prompt: Prompt | RowError) -> Prompt | RowError:
        if isinstance(prompt, RowError):
            return prompt
        if len(prompt.token_ids) <= self._unpooled:
            what = f"nothing is left of the text behind the {self._unpooled} tokens of its prompt"
            return RowError("prompt_too_long", what)
        return replace(prompt, unpooled=self._unpooled)


def _begins_with_it(item: Rendered) -> TypeGuard[RenderedText]:
    return isinstance(item, RenderedText) and item.add_special_tokens


def num_prefix_tokens(tokenizer: Tokenizer, prefix: str) -> int:
    """Tokens of a text that are its prefix's, special ones before it among them, as
    sentence-transformers counts them (base/modules/transformer.py, ``_get_prompt_length``)."""
    (ids,) = tokenizer.encode_batch([prefix], add_special_tokens=True, parse_special_tokens=True)
    ends = len(ids) > 0 and tokenizer.num_control_ids(ids[-1:]) > 0
    return len(ids) - ends
