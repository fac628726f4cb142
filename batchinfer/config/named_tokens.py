"""Checks the token ids for which a call requests log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

TokenIdTable = npt.NDArray[np.int32]

MAX_NAMED_TOKENS = 128
"""Maximum number of ids in ``logprob_token_ids``, as in vLLM."""
_NO_ID = -1


def token_id_table(given: Any, name: str) -> TokenIdTable:
    """Return lists of token ids as an array [rows, longest row], padded with -1.

    Args:
        given: lists of token ids, or an array [rows, ids].

    Raises:
        ValueError: the value is empty, or does not consist of lists of token ids.
    """
    if isinstance(given, np.ndarray):
        rows = given.tolist() if given.ndim == 2 and given.dtype.kind in "iu" else None
    else:
        is_table = isinstance(given, Sequence) and not isinstance(given, str)
        rows = list(map(_plain, given)) if is_table and not all(map(_is_id, given)) else None
    if rows is None or not any(isinstance(row, Sequence) for row in rows):
        raise ValueError(
            f"{name} must be integers of shape [num_rows, num_ids]: a list of "
            "token ids for each prompt token except the first"
        )
    for at, row in enumerate(rows):
        if not isinstance(row, Sequence) or not all(map(_is_id, row)):
            raise ValueError(f"{name}: row {at} must be a list of integer token ids")
    width = max(map(len, rows))
    if width == 0:
        raise ValueError(
            f"{name} must be non-empty, but all of its {len(rows)} rows are empty lists"
        )
    table = np.full((len(rows), width), _NO_ID, dtype=np.int32)
    for cells, row in zip(table, rows, strict=True):
        _check_range(row, name, 2**31)
        cells[: len(row)] = row
    return table


def _plain(row: Any) -> Any:
    return row.tolist() if isinstance(row, np.ndarray) else row


def _is_id(value: object) -> bool:
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_whole and -(2**63) <= int(value) < 2**64  # type: ignore[call-overload]


def check_token_id_table(
    table: TokenIdTable, name: str, *, vocab_size: int, most_ids: int, max_model_len: int
) -> None:
    """Raise ValueError if a table has too many rows or ids per row, or an invalid token id."""
    num_rows, num_ids = table.shape
    if num_rows > max_model_len - 1:
        raise ValueError(
            f"{name} has {num_rows} rows; a prompt has at most {max_model_len - 1} "
            "scored rows, one for each token except the first"
        )
    if num_ids > most_ids:
        raise ValueError(
            f"{name} has {num_ids} ids in a row, but max_logprobs is {most_ids}; "
            f"set LLM(max_logprobs=...) to at least {num_ids}"
        )
    _check_range([int(table.max()), int(table.min())], name, vocab_size)


def check_named_tokens(token_ids: Sequence[int], name: str, vocab_size: int) -> None:
    """Raise ValueError if there are too many token ids, or an id is outside the vocabulary."""
    if len(token_ids) > MAX_NAMED_TOKENS:
        raise ValueError(f"{name} has {len(token_ids)} ids; at most {MAX_NAMED_TOKENS} are allowed")
    if token_ids and min(token_ids) < 0:
        raise ValueError(f"{name} has {min(token_ids)}; token ids are 0 or more")
    if token_ids and max(token_ids) >= vocab_size:
        raise ValueError(
            f"{name} has {max(token_ids)}, which is out-of-vocab; the model's token ids are below "
            f"{vocab_size}"
        )


def _check_range(token_ids: Sequence[int], name: str, vocab_size: int) -> None:
    for token_id in token_ids:
        if not _NO_ID <= token_id < vocab_size:
            raise ValueError(
                f"{name} has {token_id}, which is out-of-vocab; integer token ids "
                f"are below {vocab_size}, and -1 stands for no token"
            )
