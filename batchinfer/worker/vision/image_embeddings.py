"""Embeds images, and keeps the embeddings of the images used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from batchinfer.engine.images import Image, StepImage
from batchinfer.worker.vision.deepstack import deepstack
from batchinfer.worker.vision.tower import VisionTower

EMBEDDING_BYTES = 1 << 28
"""Bytes of the device that hold embeddings of images."""


class ImageEmbeddings:
    """Embeddings of images, computed by the vision tower when a step first needs them.

    Args:
        num_bytes: size limit of the kept embeddings. A step's own images are kept while it runs,
            even if they exceed the limit.
        layers: decoder layers of the language model, for towers whose images change their outputs.
    """

    def __init__(
        self, tower: VisionTower, num_bytes: int, layers: Sequence[nn.Module] = ()
    ) -> None:
        self.num_encoded = 0
        """Number of images embedded so far."""
        self._tower = tower
        self._num_bytes = num_bytes
        self._layers = layers
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._used_bytes = 0

    def put(
        self, images: Iterable[StepImage], embeddings: torch.Tensor
    ) -> AbstractContextManager[None] | None:
        """Write a step's image tokens into the embeddings [T, hidden] of its packed tokens.

        Returns:
            A context in which the images change the outputs of the first decoder layers; None if
            the model has no such images.
        """
        all_indices, added = [], []
        for each in images:
            levels = self._of(each.image)[:, each.first : each.first + len(each.indices)]
            levels = levels.to(embeddings.dtype)
            indices = torch.from_numpy(each.indices).to(embeddings.device, torch.int64)
            embeddings[indices] = levels[0]
            all_indices.append(indices)
            added.append(levels[1:])
        self._drop_oldest()
        if not len(added[0]):
            return None
        return deepstack(self._layers, torch.cat(all_indices), torch.cat(added, dim=1))

    def _of(self, image: Image) -> torch.Tensor:
        """Return the embeddings [1 + D, tokens, hidden] of an image."""
        if image.number in self._kept:
            self._kept.move_to_end(image.number)
            return self._kept[image.number]
        embedded: torch.Tensor = self._tower(image.load_inputs())
        assert embedded.shape[1] == image.num_tokens
        self._kept[image.number] = embedded
        self._used_bytes += embedded.nbytes
        self.num_encoded += 1
        return embedded

    def _drop_oldest(self) -> None:
        while self._used_bytes > self._num_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._used_bytes -= dropped.nbytes
