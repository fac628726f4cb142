"""Reads prompts that are given as embeddings (``prompt_embeds``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch

from batchinfer.engine.step import UInt8
from batchinfer.text.prompts import Prompt
from batchinfer.text.tokenizer import TokenIds

REMEMBERED = 1 << 17
"""Number of distinct vectors whose ids are kept for later prompts, in about 30 MB."""


class PromptEmbeds:
    """Reads the ``prompt_embeds`` of an ``LLM``'s prompts.

    Every distinct vector gets a negative id. The prefix index compares ids, so prompts share the KV
    blocks of equal vectors, and never those of different vectors. A vector that was not among the
    last ``remembered`` ones gets a new id.

    Args:
        size: size H of the model's input embeddings.
        dtype: the model's dtype.
        numbers: numbers for ids that nothing else uses.
    """

    def __init__(
        self, size: int, dtype: torch.dtype, numbers: Iterator[int], remembered: int = REMEMBERED
    ) -> None:
        self._size = size
        self._dtype = dtype
        self._numbers = numbers
        self._remembered = remembered
        self._id_of: OrderedDict[bytes, int] = OrderedDict()
        """Ids by the hash of their vector, in the order of their last use."""

    def read(self, value: object, name: str, text: str | None) -> Prompt:
        """Return the prompt of a tensor [tokens, H] or [1, tokens, H] in the model's dtype.

        Args:
            name: the value's name in messages.
            text: text that outputs show for the prompt.

        Raises:
            TypeError: ``value`` is not a tensor, or has another dtype.
            ValueError: the tensor has another shape, or contains NaN or infinity.
        """
        wanted = (
            f"give a tensor [tokens, {self._size}] of {self._dtype}, which is the model's dtype"
        )
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} has the type {type(value).__name__}; {wanted}")
        if value.dtype != self._dtype:
            raise TypeError(f"{name} has the dtype {value.dtype}; {wanted}")
        is_batch = value.ndim == 3 and len(value) == 1
        tensor = value.detach()[0] if is_batch else value.detach()
        if tensor.ndim != 2 or tensor.shape[1] != self._size:
            raise ValueError(f"{name} has the shape {list(value.shape)}; {wanted}")
        if not tensor.isfinite().all():
            raise ValueError(f"{name} contains NaN or infinity")
        vectors = tensor.cpu().contiguous().view(torch.uint8).numpy()
        return Prompt(self._ids(vectors), text, False, False, embeds=vectors)

    def _ids(self, vectors: UInt8) -> TokenIds:
        ids = np.empty(len(vectors), np.int32)
        for at, vector in enumerate(vectors):
            key = blake2b(vector.data, digest_size=16).digest()
            if key not in self._id_of:
                self._id_of[key] = -1 - next(self._numbers)
            ids[at] = self._id_of[key]
            self._id_of.move_to_end(key)
            if len(self._id_of) > self._remembered:
                self._id_of.popitem(last=False)
        return ids
