"""Builds the prompts of rerankers from a query and a document.

``PairPromptBuilder`` lets the tokenizer join query and document, as sentence-transformers'
``CrossEncoder`` does (in transformers, ``tokenizer(query, document)``). ``QuestionBuilder`` asks
the model in words whether the document meets the query; the words are from Qwen3-Reranker's model
card (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchinfer.config import ClassifyConfig, PromptConfig
from batchinfer.errors import RowError
from batchinfer.text.prompt_sources import require_column
from batchinfer.text.prompts import (
    Prompt,
    PromptBuilder,
    PromptTooLongError,
    Rendered,
    RowValues,
    or_error,
)
from batchinfer.text.row_values import decoded
from batchinfer.text.tokenize_rows import each_apart_if_needed, unencodable
from batchinfer.text.tokenizer import TokenIds, Tokenizer

Pair = tuple[str, str]


def read_pair(row: RowValues, columns: Pair) -> Pair:
    """Return a row's query and document.

    Raises:
        RowError: ``empty_prompt``, ``invalid_utf8``, ``unsupported_content``, ``row_too_large``.
    """
    query, document = (_text(row, name) for name in columns)
    return query, document


def _text(row: RowValues, name: str) -> str:
    value = decoded(row.get(name), name)
    if value is None or (isinstance(value, str) and not value.strip()):
        what = "null" if value is None else "empty or whitespace only"
        raise RowError("empty_prompt", f"column {name} is {what}")
    if not isinstance(value, str):
        raise RowError("unsupported_content", f"column {name}: {type(value).__name__} is not text")
    if error := unencodable(value):
        raise error
    return value


class PairPromptBuilder:
    """Builds prompts from pairs that the tokenizer joins. Thread-safe.

    With ``PromptConfig.on_too_long: truncate_right``, long pairs are cut as transformers does with
    ``truncation="longest_first"``: at the end of the longer text.

    Args:
        pair_columns: columns of the query and of the document.
        max_model_len: maximum number of tokens of a prompt.
        others: options of other builders; this builder ignores them.

    Raises:
        DataError: a column is missing.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Tokenizer,
        *,
        pair_columns: Pair,
        max_model_len: int,
        columns: Sequence[str],
        **others: Any,
    ) -> None:
        for name, key in zip(pair_columns, ("query_column", "document_column"), strict=True):
            require_column(name, f"classify.{key}", columns)
        self._tokenizer = tokenizer
        self._max_tokens = max_model_len
        self._cuts = config.on_too_long == "truncate_right"
        self._parse_special_tokens = config.parse_special_tokens
        self.columns = tuple(dict.fromkeys(pair_columns))
        self._pair_columns = pair_columns

    def render(self, rows: Sequence[RowValues]) -> list[Pair | RowError]:
        return [or_error(lambda item: read_pair(item, self._pair_columns), row) for row in rows]

    def tokenize(self, pairs: Sequence[Pair | RowError]) -> list[Prompt | RowError]:
        """Return a prompt or an error for each row, in order.

        Error codes: ``empty_prompt``, ``prompt_too_long``, ``invalid_utf8``,
        ``unsupported_content``, ``row_too_large``.
        """
        valid = [pair for pair in pairs if not isinstance(pair, RowError)]
        encoded = iter(each_apart_if_needed(self._encode, valid))
        return [
            pair if isinstance(pair, RowError) else self._prompt(pair, next(encoded))
            for pair in pairs
        ]

    def _encode(self, pairs: Sequence[Pair]) -> list[tuple[TokenIds, int]]:
        parses = self._parse_special_tokens
        return self._tokenizer.encode_pairs(pairs, parse_special_tokens=parses)

    def _prompt(self, pair: Pair, encoded: tuple[TokenIds, int] | RowError) -> Prompt | RowError:
        if isinstance(encoded, RowError):
            return encoded
        ids, first_segment = encoded
        if len(ids) == 0:
            return RowError("empty_prompt", "the query and the document have no tokens")
        most, parses = self._max_tokens, self._parse_special_tokens
        is_long = len(ids) > most
        if is_long and not self._cuts:
            return PromptTooLongError(len(ids), most, "the query and the document have")
        if is_long:
            ids, first_segment = self._tokenizer.cut_pair(pair, most, parse_special_tokens=parses)
        has_control = not parses and any(map(self._tokenizer.control.occur_in, pair))
        return Prompt(ids, "\n".join(pair), is_long, has_control, first_segment=first_segment)


_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Jinja drops a template's last line break. An empty expression at the end keeps it.
_QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: %s\n<Query>: %s\n<Document>: %s<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n{{ '' }}"
)


def with_question(prompt: PromptConfig, classify: ClassifyConfig) -> PromptConfig:
    """Return ``prompt`` with Qwen3-Reranker's template, which reads the columns of ``classify``."""
    instruction = json.dumps(classify.instruction or _INSTRUCTION, ensure_ascii=False)
    parts = [f"{{{{ {instruction} }}}}", *_columns(classify)]
    return replace(prompt, template=_QWEN3_RERANKER % tuple(parts), chat_template="none")


def with_both_columns(prompt: PromptConfig, classify: ClassifyConfig) -> PromptConfig:
    """Return ``prompt`` with the text of both columns of ``classify``, separated by a space."""
    return replace(prompt, template=" ".join(_columns(classify)), chat_template="none")


def _columns(classify: ClassifyConfig) -> list[str]:
    columns = (classify.query_column, classify.document_column)
    return [f"{{{{ row[{json.dumps(name, ensure_ascii=False)}] }}}}" for name in columns]


class QuestionBuilder:
    """Builds prompts from pairs with the template in ``PromptConfig``. Thread-safe.

    Args:
        options: other options of ``PromptBuilder``, whose errors this class also raises.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Tokenizer,
        *,
        pair_columns: Pair,
        max_model_len: int,
        **options: Any,
    ) -> None:
        self._prompts = PromptBuilder(config, tokenizer, max_model_len=max_model_len + 1, **options)
        self._pair_columns = pair_columns
        self.columns = self._prompts.columns

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]:
        pairs = [or_error(lambda item: read_pair(item, self._pair_columns), row) for row in rows]
        texts = self._prompts.render(rows)
        return [
            pair if isinstance(pair, RowError) else text
            for pair, text in zip(pairs, texts, strict=True)
        ]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]:
        return self._prompts.tokenize(rendered)
