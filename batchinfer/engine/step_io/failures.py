"""Errors of rows whose tokens cannot be drawn."""

from __future__ import annotations

Failure = tuple[str, str]
"""Error code and message of a row."""

NAN_LOGITS: Failure = ("nan_logits", "the logits contain NaN or infinity")
NO_TOKEN_LEFT: Failure = (
    "no_token_left",
    "every next token is excluded by bad_words, no_repeat_ngram_size, allowed_token_ids, "
    "min_tokens or the grammar",
)


def grammar_failure(error: str) -> Failure:
    return "invalid_structured_output", error
