"""Pairs as a question to the model: whether the document meets the query.

The words are from Qwen3-Reranker's model card
(https://huggingface.co/Qwen/Qwen3-Reranker-0.6B).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchinfer.config import ClassifyConfig, PromptConfig
from batchinfer.errors import RowError
from batchinfer.text.pairs.joined import Pair, read_pair
from batchinfer.text.prompts import Prompt, PromptBuilder, Rendered, RowValues, or_error
from batchinfer.text.tokenizer import Tokenizer

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Jinja drops the last line break of a template, so this one ends with an empty expression.
_QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: %s\n<Query>: %s\n<Document>: %s<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n{{ '' }}"
)


def with_question(prompt: PromptConfig, classify: ClassifyConfig) -> PromptConfig:
    """Returns ``prompt`` with the template of a Qwen3-Reranker over the columns of ``classify``."""
    instruction = json.dumps(classify.instruction or _INSTRUCTION, ensure_ascii=False)
    parts = [f"{{{{ {instruction} }}}}", *_columns(classify)]
    return replace(prompt, template=_QWEN3_RERANKER % tuple(parts), chat_template="none")


def with_both_columns(prompt: PromptConfig, classify: ClassifyConfig) -> PromptConfig:
    """Returns ``prompt`` with both columns of ``classify``, one after the other."""
    return replace(prompt, template=" ".join(_columns(classify)), chat_template="none")


def _columns(classify: ClassifyConfig) -> list[str]:
    columns = (classify.query_column, classify.document_column)
    return [f"{{{{ row[{json.dumps(name, ensure_ascii=False)}] }}}}" for name in columns]


class QuestionBuilder:
    """Builds prompts from pairs by the template in ``PromptConfig``. Thread-safe.

    Args:
        pair_columns: columns of the query and of the document.
        others: as of ``PromptBuilder``, which also raises the same errors.
    """

    def __init__(
        self, config: PromptConfig, tokenizer: Tokenizer, *, pair_columns: Pair, **others: Any
    ) -> None:
        self._prompts = PromptBuilder(config, tokenizer, **others)
        self._pair_columns = pair_columns
        self.columns = self._prompts.columns
        """The input columns that ``build`` needs."""

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]:
        """Returns the text or the error of each row."""
        pairs = [or_error(lambda one: read_pair(one, self._pair_columns), row) for row in rows]
        rendered = self._prompts.render(rows)
        return [
            pair if isinstance(pair, RowError) else text
            for pair, text in zip(pairs, rendered, strict=True)
        ]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]:
        """Returns a prompt or an error for each row, in order."""
        return self._prompts.tokenize(rendered)
