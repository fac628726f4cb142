"""Pairs that the tokenizer joins, as sentence-transformers' ``CrossEncoder`` does: in transformers,
``tokenizer(query, document)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError
from batchinfer.text.encode import each_apart_if_needed, unencodable
from batchinfer.text.prompt_sources import require_column
from batchinfer.text.prompts import Prompt, PromptTooLongError, RowValues, or_error
from batchinfer.text.row_values import decoded
from batchinfer.text.tokenizer import TokenIds, Tokenizer

Pair = tuple[str, str]
"""A query and a document."""


def read_pair(row: RowValues, columns: Pair) -> Pair:
    """Returns a row's query and document.

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


class PairBuilder:
    """Builds prompts from pairs that the tokenizer joins. Thread-safe.

    With ``PromptConfig.on_too_long: truncate_right``, long pairs are cut as transformers does with
    ``truncation="longest_first"``: at the end of the longer text.

    Args:
        pair_columns: columns of the query and of the document.
        max_model_len: most tokens of prompt and output together.
        columns: of the data.
        leaves_room: keep room for an output token, which a causal model samples.
        others: arguments of other builders, which are ignored.

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
        """Returns the pair or the error of each row."""
        return [or_error(lambda one: read_pair(one, self._pair_columns), row) for row in rows]

    def tokenize(self, pairs: Sequence[Pair | RowError]) -> list[Prompt | RowError]:
        """Returns a prompt or an error for each row, in order.

        Error codes: ``empty_prompt``, ``prompt_too_long``, ``invalid_utf8``,
        ``unsupported_content``, ``row_too_large``.
        """
        given = [pair for pair in pairs if not isinstance(pair, RowError)]
        encoded = iter(each_apart_if_needed(self._encode, given))
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
