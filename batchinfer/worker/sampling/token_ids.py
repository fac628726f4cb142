"""Checks token ids before they index logits."""

from __future__ import annotations

from batchinfer.engine.step import Int32


def check_token_ids(token_ids: Int32, vocab_size: int, *, least: int = 0) -> None:
    """Raise IndexError unless all ids of an array of any shape are in the vocabulary. On a GPU, an
    index out of range would crash the whole process.

    Args:
        least: smallest valid id; -1 if -1 marks padding.
    """
    if token_ids.min(initial=least) < least or token_ids.max(initial=-1) >= vocab_size:
        raise IndexError("a token id is not in the model's vocabulary")
