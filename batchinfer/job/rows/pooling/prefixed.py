"""Prompts of texts that something is put before, as an embedding model was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchinfer.errors import RowError
from batchinfer.text.encode import RenderedText
from batchinfer.text.prompts import Prompt, PromptBuilder, Rendered, RowValues


class PrefixedPrompts:
    """A builder whose texts begin with ``prefix``; token ids, and what a chat template wrote, stay
    as they are."""

    def __init__(self, prompts: PromptBuilder, prefix: str) -> None:
        self._prompts = prompts
        self._prefix = prefix
        self.columns = prompts.columns
        """The input columns that ``render`` needs."""

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]:
        """The rows' texts, or their errors."""
        return [
            replace(item, text=self._prefix + item.text)
            if isinstance(item, RenderedText) and item.add_special_tokens
            else item
            for item in self._prompts.render(rows)
        ]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]:
        """A prompt or an error for each row, in order."""
        return self._prompts.tokenize(rendered)
