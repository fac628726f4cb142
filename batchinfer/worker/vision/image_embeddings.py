"""Embeds images, and keeps the embeddings of the images used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch

from batchinfer.engine.images import Image, StepImage
from batchinfer.worker.vision.tower import VisionTower

EMBEDDING_BYTES = 1 << 28
"""Bytes of the device that hold embeddings of images."""


class ImageEmbeddings:
    """Embeddings of images, computed by the vision tower when a step first needs them.

    Args:
        num_bytes: size limit of the kept embeddings. A step's own images are kept while it runs,
            even if they exceed the limit.
    """

    def __init__(self, tower: VisionTower, num_bytes: int) -> None:
        self.num_encoded = 0
        """Number of images embedded so far."""
        self._tower = tower
        self._num_bytes = num_bytes
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._used_bytes = 0

    def put(self, images: Iterable[StepImage], embeddings: torch.Tensor) -> None:
        """Write a step's image tokens into the embeddings [T, hidden] of its packed tokens."""
        for each in images:
            rows = self._of(each.image)[each.first : each.first + len(each.indices)]
            indices = torch.from_numpy(each.indices).to(embeddings.device, torch.int64)
            embeddings[indices] = rows.to(embeddings.dtype)
        self._drop_oldest()

    def _of(self, image: Image) -> torch.Tensor:
        """Return the embeddings [tokens, hidden] of an image."""
        if image.number in self._kept:
            self._kept.move_to_end(image.number)
            return self._kept[image.number]
        embedded: torch.Tensor = self._tower(image.load_inputs())
        assert len(embedded) == image.num_tokens
        self._kept[image.number] = embedded
        self._used_bytes += embedded.nbytes
        self.num_encoded += 1
        return embedded

    def _drop_oldest(self) -> None:
        while self._used_bytes > self._num_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._used_bytes -= dropped.nbytes
