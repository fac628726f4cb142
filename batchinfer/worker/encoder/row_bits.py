"""A check for ``engine.deterministic``: does a text keep its bits beside others?"""

from __future__ import annotations

import torch

from batchinfer.errors import ModelError
from batchinfer.worker.encoder.loader import Encoder

_LENGTHS = (1, 2, 5, 17, 33, 64)
_COUNT = 5
"""Texts of a length that run side by side."""


def check_batch_invariance(encoder: Encoder, vocab_size: int, max_model_len: int) -> None:
    """Compare hidden states of texts alone with those beside others, of equal and other lengths.

    Raises:
        ModelError: their bits differ, or on a CUDA device may.
    """
    if encoder.body.device.type == "cuda":
        raise _refused(encoder, "products and attention on a CUDA device do not keep a text's bits")
    lengths = [length for length in _LENGTHS if length <= max_model_len]
    texts = [(torch.arange(length) * 7 + 1) % vocab_size for length in lengths]
    alone = [_states(encoder, [text], [1]) for text in texts]
    together = _states(encoder, texts, [_COUNT] * len(texts))
    expected = torch.cat([states.repeat(_COUNT, 1) for states in alone])
    if not torch.equal(together, expected):
        raise _refused(
            encoder, "some layers compute a text's last bits in another way when others run beside"
        )


def _states(encoder: Encoder, texts: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """Hidden states of texts, each so many times, packed."""
    token_ids, positions, runs, start = [], [], [], 0
    for text, count in zip(texts, counts, strict=True):
        runs.append((start, count, len(text)))
        token_ids.append(text.repeat(count))
        positions.append(torch.arange(len(text)).repeat(count))
        start += count * len(text)
    places = torch.cat(positions)
    return encoder(torch.cat(token_ids), places, places * 0, runs)


def _refused(encoder: Encoder, why: str) -> ModelError:
    family = encoder.body.config.model_type
    return ModelError(
        f"engine.deterministic is true, but in models of the family {family!r}, which read texts "
        f"whole, {why}",
        hint="set engine.deterministic: false",
    )
