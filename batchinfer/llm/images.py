"""Loads the images in prompts of ``LLM`` calls."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError
from batchinfer.requests.images import ROWS_AHEAD, FinishLoading, ImageLoader, ImageNumbers
from batchinfer.text.images.files import ImageFile, ImageFiles
from batchinfer.text.images.image_placeholders import ImageSettings
from batchinfer.text.images.token_prompts import TokenPrompts
from batchinfer.text.processes.pool import TextProcesses
from batchinfer.text.prompts import ANY_LENGTH, Prompt, PromptBuilder
from batchinfer.text.tokenizer import TokenIds

if TYPE_CHECKING:
    from batchinfer.llm.outputs import PromptRequest
    from batchinfer.worker.vision.support import ImageSupport


@dataclass(frozen=True)
class TextWithImages:
    """A text with a placeholder for each image."""

    text: str
    images: list[ImageFile | RowError]


@dataclass(frozen=True, eq=False)
class TokensWithImages:
    """Token ids with a placeholder for each image."""

    token_ids: TokenIds
    text: str | None
    """Text that outputs show for the token ids."""
    images: list[ImageFile | RowError]


class CallImages:
    """Makes the prompts of ``LLM`` calls that have images, and loads the images.

    Args:
        numbers: numbers for images that nothing else uses.
    """

    def __init__(
        self, support: ImageSupport, processes: TextProcesses, numbers: Iterator[int]
    ) -> None:
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
        self._numbers = ImageNumbers(numbers=numbers)

    def prompts(
        self, items: Sequence[TextWithImages | TokensWithImages]
    ) -> list[Prompt | RowError]:
        """Make a prompt from each item, in order, or a RowError if that is not possible."""
        errors = [_error_of(item) for item in items]
        good = [item for item, error in zip(items, errors, strict=True) if error is None]
        texts = [item for item in good if isinstance(item, TextWithImages)]
        tokens = [item for item in good if isinstance(item, TokensWithImages)]
        of_texts, of_tokens = iter(self._of_texts(texts)), iter(self._of_tokens(tokens))
        return [
            error or next(of_texts if isinstance(item, TextWithImages) else of_tokens)
            for item, error in zip(items, errors, strict=True)
        ]

    def _of_texts(self, items: Sequence[TextWithImages]) -> list[Prompt | RowError]:
        if not items:
            return []
        recipe = partial(
            PromptBuilder,
            PromptConfig(
                column="text", images="image", chat_template="none", parse_special_tokens=True
            ),
            max_model_len=ANY_LENGTH,
            columns=["text", "image"],
            images=self.settings,
        )
        rows = [{"text": item.text, "image": item.images} for item in items]
        return self._processes.prompts(recipe).build(rows)

    def _of_tokens(self, items: Sequence[TokensWithImages]) -> list[Prompt | RowError]:
        if not items:
            return []
        rows = [
            {"token_ids": item.token_ids, "text": item.text, "images": item.images}
            for item in items
        ]
        return self._processes.prompts(partial(TokenPrompts, self.settings)).build(rows)

    def load(self, items: Sequence[PromptRequest]) -> None:
        """Number and load the images of prompts.

        If an image cannot be decoded, the error replaces its prompt. To save memory, pixels beyond
        a limit are dropped, and decoded again when needed.
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


def _error_of(item: TextWithImages | TokensWithImages) -> RowError | None:
    """Return the error of a prompt's first image that cannot be decoded."""
    return next((image for image in item.images if isinstance(image, RowError)), None)


def _finish(item: PromptRequest, finish: FinishLoading) -> None:
    try:
        item.images = finish()
    except RowError as error:
        item.prompt = RowError(error.code, error.message)


def is_picture(value: object) -> bool:
    """Return True for a PIL image."""
    return type(value).__module__.partition(".")[0] == "PIL"


def image_file(value: Any) -> ImageFile | RowError:
    """Convert a PIL image, an array [height, width, 3] of uint8, or the bytes of a file.

    A picture that cannot be decoded becomes the error ``invalid_image``.

    Raises:
        TypeError: ``value`` is something else.
    """
    if isinstance(value, bytes):
        return ImageFile(value)
    from PIL import Image

    from batchinfer.text.images.decode import rgb_of

    if isinstance(value, np.ndarray):
        kind = f"is an array of {value.dtype} with the shape {value.shape}"
        if value.dtype == np.uint8 and (value.ndim == 2 or value.shape[2:] in ((3,), (4,))):
            value = Image.fromarray(value)
    else:
        kind = f"has the type {type(value).__name__}"
    if not is_picture(value):
        raise TypeError(
            f"an image {kind}; pass a PIL image, a uint8 array of the shape [height, width, 3], or "
            "the bytes of a file"
        )
    file = io.BytesIO()
    try:
        rgb_of(value, PromptConfig().max_image_pixels, "an image").save(file, "PPM")  # fast
    except RowError as error:
        return error
    return ImageFile(file.getvalue())
