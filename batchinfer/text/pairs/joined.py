"""Pairs that the tokenizer joins: ``tokenizer(query, document)`` in transformers, as
sentence-transformers' ``CrossEncoder`` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError
from batchinfer.text.encode import each_apart_if_needed
from batchinfer.text.pairs.pair import Pair, read_pair
from batchinfer.text.prompt_sources import require_column
from batchinfer.text.prompts import Prompt, PromptTooLongError, RowValues, or_error
from batchinfer.text.tokenizer import TokenIds, Tokenizer


class PairBuilder:
    """Builder of prompts from pairs that the tokenizer joins. Thread-safe.

    One that is too long is cut as transformers does with ``truncation="longest_first"``, where
    ``PromptConfig.on_too_long`` is ``truncate_right``: off the end of whichever text is longer.

    Args:
        pair_columns: of the query and of the document.
        max_model_len: most tokens of prompt and output together.
        columns: of the data.
        leaves_room: for an output token, which a causal model draws.
        others: of ``PromptBuilder``; they play no part.

    Raises:
        DataError: the data does not have one of the columns.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Tokenizer,
        *,
        pair_columns: Pair,
        max_model_len: int,
        columns: Sequence[str],
        leaves_room: bool = True,
        **others: Any,
    ) -> None:
        for name, key in zip(pair_columns, ("query_column", "document_column"), strict=True):
            require_column(name, f"classify.{key}", columns)
        self._tokenizer = tokenizer
        self._max_tokens = max_model_len - leaves_room
        self._cuts = config.on_too_long == "truncate_right"
        self._parse_special_tokens = config.parse_special_tokens
        self.columns = tuple(dict.fromkeys(pair_columns))
        """The input columns that ``build`` needs."""
        self._pair_columns = pair_columns

    def render(self, rows: Sequence[RowValues]) -> list[Pair | RowError]:
        """The rows' pairs, or their errors."""
        return [or_error(self._pair, row) for row in rows]

    def tokenize(self, pairs: Sequence[Pair | RowError]) -> list[Prompt | RowError]:
        """A prompt or an error for each row, in order.

        Error codes: ``empty_prompt``, ``prompt_too_long``, ``invalid_utf8``,
        ``unsupported_content``, ``row_too_large``.
        """
        given = [pair for pair in pairs if not isinstance(pair, RowError)]
        encoded = iter(each_apart_if_needed(self._encode, given))
        return [
            pair if isinstance(pair, RowError) else self._prompt(pair, next(encoded))
            for pair in pairs
        ]

    def _pair(self, row: RowValues) -> Pair:
        return read_pair(row, self._pair_columns)

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
