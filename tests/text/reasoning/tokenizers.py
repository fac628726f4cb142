"""Byte tokenizers with the control tokens of reasoning models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from batchinfer.engine.request import SampleOutput
from batchinfer.protocols import StopMatch
from batchinfer.text.tokenizer import TokenIds, Tokenizer

EOS = "<eos>"


def byte_tokenizer(
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    chat_template: str | None = None,
    *,
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    """Return a tokenizer of bytes and control tokens; decoded texts contain the ``added`` ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({text: at for at, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([EOS, *special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    return Tokenizer(
        backend,
        chat_template=chat_template,
        special_tokens={"eos_token": EOS},
        control_tokens=frozenset({EOS, *special}),
    )


def encode(tokenizer: Tokenizer, text: str) -> TokenIds:
    """Return the ids of a text, with control tokens parsed."""
    return tokenizer.encode_batch([text], add_special_tokens=False, parse_special_tokens=True)[0]


def sample_of(token_ids: TokenIds, *, stop: str | None = None, text_end: int = 0) -> SampleOutput:
    """Return a finished sample, ended by a stop string or else by its length."""
    ids = np.asarray(token_ids, dtype=np.int32)
    match = None if stop is None else StopMatch(stop, text_end)
    return SampleOutput(0, ids, "length" if match is None else "stop", None, match, 0.0, None)


def ended(token_ids: TokenIds) -> SampleOutput:
    """Return a sample that ended with its last token."""
    return SampleOutput(0, np.asarray(token_ids, np.int32), "stop", None, None, 0.0, None)
