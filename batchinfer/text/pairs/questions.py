"""Pairs asked about in words: whether the document meets the query.

The words are those of Qwen3-Reranker's model card
(https://huggingface.co/Qwen/Qwen3-Reranker-0.6B).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchinfer.config import ClassifyConfig, PromptConfig
from batchinfer.errors import RowError
from batchinfer.text.pairs.pair import Pair, read_pair
from batchinfer.text.prompts import Prompt, PromptBuilder, Rendered, RowValues, or_error
from batchinfer.text.tokenizer import Tokenizer

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Jinja drops the line's end that a template ends with, and this one ends with nothing.
_QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: %s\n<Query>: %s\n<Document>: %s<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n{{ '' }}"
)


def with_question(prompt: PromptConfig, classify: ClassifyConfig) -> PromptConfig:
    """``prompt`` with the template of a Qwen3-Reranker over the columns of ``classify``."""
    columns = (classify.query_column, classify.document_column)
    parts = [_literal(classify.instruction or _INSTRUCTION)]
    parts += [f"{{{{ row[{json.dumps(name, ensure_ascii=False)}] }}}}" for name in columns]
    return replace(prompt, template=_QWEN3_RERANKER % tuple(parts), chat_template="none")


def with_both_columns(prompt: PromptConfig, classify: ClassifyConfig) -> PromptConfig:
    """``prompt`` as if the columns of ``classify`` were one text after the other."""
    columns = (classify.query_column, classify.document_column)
    parts = [f"{{{{ row[{json.dumps(name, ensure_ascii=False)}] }}}}" for name in columns]
    return replace(prompt, template=" ".join(parts), chat_template="none")


def _literal(text: str) -> str:
    """A text in a template that comes out as it is."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}"


class QuestionBuilder:
    """Builder of prompts from pairs, by the template in ``PromptConfig``. Thread-safe.

    Args:
        pair_columns: of the query and of the document.
        others: as of ``PromptBuilder``; so are its errors.
    """

    def __init__(
        self, config: PromptConfig, tokenizer: Tokenizer, *, pair_columns: Pair, **others: Any
    ) -> None:
        self._prompts = PromptBuilder(config, tokenizer, **others)
        self._pair_columns = pair_columns
        self.columns = self._prompts.columns
        """The input columns that ``build`` needs."""

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]:
        """The rows' texts, or their errors."""
        pairs = [or_error(self._pair, row) for row in rows]
        rendered = self._prompts.render(rows)
        return [
            pair if isinstance(pair, RowError) else text
            for pair, text in zip(pairs, rendered, strict=True)
        ]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]:
        """A prompt or an error for each row, in order."""
        return self._prompts.tokenize(rendered)

    def _pair(self, row: RowValues) -> Pair:
        return read_pair(row, self._pair_columns)
