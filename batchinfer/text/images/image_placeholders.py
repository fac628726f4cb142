"""Opens the images of a row, and replaces their placeholders in its prompt with image tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.config import PromptConfig
from batchinfer.errors import ModelError, RowError
from batchinfer.text.images.files import ImageFile, ImageFiles
from batchinfer.text.images.find_images import RowImageFiles
from batchinfer.text.prompt_sources import require_column
from batchinfer.text.tokenizer import TokenIds

if TYPE_CHECKING:
    from batchinfer.text.images.processor import ImageProcessor

KEY_BYTES = 16


@dataclass(frozen=True)
class ImageSettings:
    """Settings that say how to find and process images. Picklable.

    Args:
        token_id: id of the token that the embeddings of an image replace.
        files: finds the images to which the values of rows refer.
        max_pixels: largest allowed number of pixels of an image.
        salt: hash of everything else that affects an image's pixels.
        merge_size: for models with multimodal rotary positions: each image token covers
            ``merge_size`` x ``merge_size`` patches.
        attends_both_ways: ``engine.images.Image.attends_both_ways`` of the model's images.
    """

    model_folder: Path
    token_id: int
    files: ImageFiles
    max_pixels: int
    processor_kwargs: Mapping[str, Any]
    salt: bytes = b""
    merge_size: int | None = None
    attends_both_ways: bool = False

    def processor(self) -> ImageProcessor:
        """Load the image processor; later calls return the same object.

        Raises:
            ModelError: the processor cannot be loaded, or Pillow is missing.
        """
        from batchinfer.text.images.loading import load_image_processor

        return load_image_processor(self.model_folder, self.token_id, self.processor_kwargs)

    def placeholder(self) -> str | None:
        """Return the placeholder of an image; None if the image processor cannot be loaded, in
        which case prompts cannot have images."""
        try:
            return self.processor().placeholder
        except ModelError:
            return None

    def prepare(self) -> None:
        """Load the image processor without torch, before this process forks.

        The image processors do not need torch, and importing it takes 4 s.
        """
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        self.processor()

    def key_of(self, data: bytes) -> bytes:
        """Return the key of an image: a hash of its bytes and of the settings that turn the bytes
        into pixels."""
        return blake2b(data, digest_size=KEY_BYTES, key=self.salt).digest()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RowImage:
    """An image of a row, before its pixels are decoded."""

    key: bytes
    """Hash of the image's bytes and settings, 16 bytes. Equal images have equal keys."""
    file: ImageFile
    size: tuple[int, int]
    """Height and width in pixels."""
    num_tokens: int
    """Number of embeddings that the vision tower computes for the image."""
    token_id: int
    """Id of the image token in the model's vocabulary."""
    number: int = -1
    """Number of the image in this process (``engine.images.Image.number``); -1: none yet."""


@dataclass(frozen=True, slots=True)
class ImagesInText:
    """The images of a rendered text. The text has a placeholder for each image."""

    images: tuple[RowImage, ...]
    placeholder: str
    replacements: tuple[str, ...]
    token_id: int

    def expanded(self, text: str) -> str:
        """Replace each placeholder with its image's tokens."""
        first, *rest = text.split(self.placeholder)
        return first + "".join(
            replacement + part for replacement, part in zip(self.replacements, rest, strict=True)
        )

    def with_negative_ids(self, token_ids: TokenIds) -> TokenIds:
        """Replace the tokens of the image at index i with the id -1 - i.

        Raises:
            RowError: ``unsupported_content``: the text itself has image tokens.
        """
        at = np.flatnonzero(token_ids == self.token_id)
        counts = [image.num_tokens for image in self.images]
        if len(at) != sum(counts):
            raise RowError(
                "unsupported_content",
                f"the prompt has {len(at)} image tokens, but its images need {sum(counts)}; "
                "remove image tokens from the text",
            )
        marked = token_ids.copy()
        marked[at] = np.repeat(-1 - np.arange(len(counts), dtype=np.int32), counts)
        return marked


class RowImages(RowImageFiles):
    """Finds and opens the images of rows.

    Raises:
        DataError: a column of ``prompt.images`` is missing.
        ModelError: the model's image processor cannot be loaded.
    """

    def __init__(
        self, settings: ImageSettings, config: PromptConfig, columns: Sequence[str]
    ) -> None:
        for name in config.image_columns:
            require_column(name, "prompt.images", columns)
        super().__init__(settings.files, config.image_columns)
        self._settings = settings
        if self.columns:
            settings.processor()  # so that a bad processor fails before the first row

    def in_text(self, text: str, files: Sequence[ImageFile]) -> ImagesInText | None:
        """Open the images of a rendered text; return None if there are none.

        Raises:
            RowError: ``invalid_image``; ``unsupported_content``: the numbers of placeholders and
                images differ.
        """
        if not files and not self.columns:
            return None
        processor = self._settings.processor()
        placeholder = processor.placeholder
        count = text.count(placeholder)
        if count != len(files):
            raise RowError(
                "unsupported_content",
                f"the rendered prompt has {count} image placeholders ({placeholder}), "
                f"but there are {len(files)} images",
            )
        if not files:
            return None
        images = tuple(opened_image(file, self._settings) for file in files)
        replacements = tuple(processor.replacement(image.size) for image in images)
        return ImagesInText(images, placeholder, replacements, self._settings.token_id)


def opened_image(file: ImageFile, settings: ImageSettings) -> RowImage:
    """Read the header of an image.

    Raises:
        RowError: ``invalid_image``.
    """
    from batchinfer.text.images.decode import OpenImage

    data = file.read()
    image = OpenImage(data, settings.max_pixels, file.name)
    num_tokens = settings.processor().num_tokens(image.size)
    return RowImage(settings.key_of(data), file, image.size, num_tokens, settings.token_id)
