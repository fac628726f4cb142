"""Embeds images, and caches the embeddings of the most recently used images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from batchinfer.engine.images import Image, StepImage
from batchinfer.errors import ModelError
from batchinfer.worker.vision.deepstack import deepstack
from batchinfer.worker.vision.encode_time import EncodeTimer
from batchinfer.worker.vision.tower import ImageInputs, VisionTower, can_pack

EMBEDDING_BYTES = 1 << 28
PACKED_BYTES = 1 << 27
"""Limit on the bytes of pixels in one call of the vision tower, which bounds the tower's
activations. A single image may be larger."""


class ImageEmbeddings:
    """Embeddings of images, computed by the vision tower when a step first needs them.

    Args:
        num_bytes: size limit of the cache. The cache keeps all images of the running step, even if
            their embeddings exceed the limit.
        layers: decoder layers of the language model; DeepStack changes the outputs of the first
            layers.
        packs: True to encode several images in one call of the tower. The bits of an image's
            embeddings then depend on the other images.
    """

    def __init__(
        self,
        tower: VisionTower,
        num_bytes: int,
        layers: Sequence[nn.Module] = (),
        *,
        packs: bool = False,
    ) -> None:
        self.timer = EncodeTimer(next(tower.parameters()).device)
        self._tower = tower
        self._num_bytes = num_bytes
        self._layers = layers
        self._packs = packs
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._used_bytes = 0

    def put(
        self, images: Iterable[StepImage], embeddings: torch.Tensor
    ) -> AbstractContextManager[None] | None:
        """Write a step's image tokens into the embeddings [T, hidden] of its packed tokens.

        Returns:
            A context manager in which DeepStack changes the outputs of the first decoder layers;
            None for models without DeepStack.
        """
        images = tuple(images)
        self._encode({each.image.number: each.image for each in images})
        all_indices, added = [], []
        for each in images:
            levels = self._kept[each.image.number]
            levels = levels[:, each.first : each.first + len(each.indices)].to(embeddings.dtype)
            indices = torch.from_numpy(each.indices).to(embeddings.device, torch.int64)
            embeddings[indices] = levels[0]
            all_indices.append(indices)
            added.append(levels[1:])
        self._drop_oldest()
        if not len(added[0]):
            return None
        return deepstack(self._layers, torch.cat(all_indices), torch.cat(added, dim=1))

    def _encode(self, images: Mapping[int, Image]) -> None:
        """Encode the images, keyed by number, that are not in the cache."""
        waiting: list[tuple[Image, ImageInputs]] = []
        for number, image in images.items():
            if number in self._kept:
                self._kept.move_to_end(number)
                continue
            inputs = image.load_inputs()
            if waiting and not self._fits(waiting, inputs):
                self._keep(waiting)
                waiting = []
            waiting.append((image, inputs))
        if waiting:
            self._keep(waiting)

    def _fits(self, waiting: Sequence[tuple[Image, ImageInputs]], inputs: ImageInputs) -> bool:
        """Return True if an image can be encoded together with the waiting images."""
        packed = [inputs for _, inputs in waiting] + [inputs]
        num_bytes = sum(array.nbytes for each in packed for array in each.values())
        return self._packs and num_bytes <= PACKED_BYTES and can_pack(packed[0], inputs)

    def _keep(self, packed: Sequence[tuple[Image, ImageInputs]]) -> None:
        """Encode images in one call of the tower, and cache their embeddings [1 + D, tokens,
        hidden]."""
        with self.timer.images(len(packed)):
            embedded = self._tower([inputs for _, inputs in packed])
        num_tokens = [image.num_tokens for image, _ in packed]
        if embedded.shape[1] != sum(num_tokens):
            raise ModelError(
                f"the vision tower returns {embedded.shape[1]} embeddings for images with "
                f"{sum(num_tokens)} tokens; change prompt.mm_processor_kwargs"
            )
        parts = embedded.split(num_tokens, dim=1)
        for (image, _), part in zip(packed, parts, strict=True):
            # A view of a packed result would keep the whole result in memory.
            self._kept[image.number] = part.clone() if len(packed) > 1 else part
            self._used_bytes += part.nbytes

    def _drop_oldest(self) -> None:
        while self._used_bytes > self._num_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._used_bytes -= dropped.nbytes
