"""Finds tokens that would repeat an n-gram (``no_repeat_ngram_size``).

Like transformers' ``NoRepeatNGramLogitsProcessor``, this module also finds n-grams in the prompt.
"""

from __future__ import annotations

import numpy as np

from batchinfer.engine.step import Int32

_IMAGE = -1
"""Stands for all tokens of images, which have the same id in the model's vocabulary."""


def repeating_tokens(prompt: Int32, output: list[int], size: int) -> set[int]:
    """Return the tokens that would repeat an n-gram of ``size`` >= 1 tokens if drawn next."""
    tokens = np.concatenate([np.maximum(prompt, _IMAGE), np.asarray(output, np.int32)])
    return set(_ends_of(tokens, size)) - {_IMAGE}


def _ends_of(tokens: Int32, size: int) -> list[int]:
    """Return the last token of every n-gram whose other tokens equal the end of ``tokens``."""
    num_ngrams = len(tokens) - size + 1
    if num_ngrams < 1:
        return []
    starts = np.arange(num_ngrams)
    for offset, token in enumerate(tokens[num_ngrams:]):
        starts = starts[tokens[starts + offset] == token]
        if not len(starts):
            break
    found: list[int] = tokens[starts + size - 1].tolist()
    return found
