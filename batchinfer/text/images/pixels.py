"""Decodes images in workers, shortly before the engine needs their pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchinfer.errors import RowError
from batchinfer.text.images.files import INVALID_IMAGE
from batchinfer.text.images.image_placeholders import ImageSettings, RowImage
from batchinfer.text.images.shared_arrays import SharedArrays
from batchinfer.text.tokenizer import Tokenizer


class PixelBuilder:
    """Turns images into arguments of the vision tower, in a worker.

    Each "row" has a single column, which holds a ``RowImage``.
    """

    columns: tuple[str, ...] = ("image",)

    def __init__(self, settings: ImageSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._processor = settings.processor()

    def render(self, rows: Sequence[Mapping[str, Any]]) -> list[RowImage]:
        return [row["image"] for row in rows]

    def tokenize(self, images: Sequence[RowImage]) -> list[Any]:
        """Return the arguments of the tower for each image as ``SharedArrays``, or the error
        ``invalid_image``."""
        return [self._made(image) for image in images]

    def _made(self, image: RowImage) -> SharedArrays | RowError:
        from batchinfer.text.images.decode import OpenImage  # needs Pillow, which is optional

        name = image.file.name
        try:
            data = image.file.read()
            if self._settings.key_of(data) != image.key:
                raise RowError(INVALID_IMAGE, f"{name} has changed since its prompt was made")
            picture = OpenImage(data, self._settings.max_pixels, name).pixels()
            return SharedArrays(self._processor.inputs(picture, image.num_tokens))
        except RowError as error:
            return error
