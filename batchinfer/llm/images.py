"""Loads the images in prompts of ``LLM`` calls."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError
from batchinfer.requests.images import ROWS_AHEAD, FinishLoading, ImageLoader, ImageNumbers
from batchinfer.text.images.files import ImageFile, ImageFiles
from batchinfer.text.images.row_images import ImageSettings
from batchinfer.text.processes.pool import TextProcesses

if TYPE_CHECKING:
    from batchinfer.llm.outputs import PromptRequest
    from batchinfer.worker.vision.support import ImageSupport


@dataclass(frozen=True)
class TextWithImages:
    """A text with a placeholder for each image."""

    text: str
    images: list[ImageFile]


class CallImages:
    """Loads the images in prompts of ``LLM`` calls."""

    def __init__(self, support: ImageSupport, processes: TextProcesses) -> None:
        self.settings = ImageSettings(
            support.folder,
            support.token_id,
            ImageFiles(),
            PromptConfig().max_image_pixels,
            {},
            merge_size=support.merge_size,
            attends_both_ways=support.attends_both_ways,
        )
        self._processes = processes
        self._numbers = ImageNumbers()

    def load(self, items: Sequence[PromptRequest]) -> None:
        """Number and load the images of prompts.

        If an image cannot be decoded, the error replaces its prompt. Pixels beyond a limit are
        dropped, and decoded again when they are needed.
        """
        loader: ImageLoader | None = None
        waiting: deque[tuple[PromptRequest, FinishLoading]] = deque()
        for item in items:
            if isinstance(item.prompt, RowError) or not item.prompt.images:
                continue
            if loader is None:
                loader = ImageLoader(self._processes, self.settings)
            item.prompt = self._numbers.numbered(item.prompt)
            finish = loader.start(item.prompt.images, item.prompt.token_ids, saves_memory=True)
            waiting.append((item, finish))
            if len(waiting) >= ROWS_AHEAD:
                _finish(*waiting.popleft())
        while waiting:
            _finish(*waiting.popleft())


def _finish(item: PromptRequest, finish: FinishLoading) -> None:
    try:
        item.images = finish()
    except RowError as error:
        item.prompt = RowError(error.code, error.message)


def is_picture(value: object) -> bool:
    """Return True for a PIL image."""
    return type(value).__module__.partition(".")[0] == "PIL"


def image_file(value: Any) -> ImageFile:
    """Convert a PIL image, an array [height, width, 3] of uint8, or the bytes of a file.

    Raises:
        TypeError: ``value`` is something else.
    """
    if isinstance(value, bytes):
        return ImageFile(value)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        from PIL import Image

        value = Image.fromarray(value)
    if not is_picture(value):
        raise TypeError(
            f"an image has the type {type(value).__name__}; pass a PIL image, a uint8 array "
            "of the shape [height, width, 3], or the bytes of a file"
        )
    file = io.BytesIO()
    value.convert("RGB").save(file, "PPM")  # without compression
    return ImageFile(file.getvalue())
