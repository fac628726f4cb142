"""Makes prompts with images from token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from batchinfer.errors import RowError
from batchinfer.text.images.image_placeholders import ImageSettings, ImagesInText, opened_image
from batchinfer.text.prompts import Prompt, or_error
from batchinfer.text.tokenizer import TokenIds, Tokenizer


class TokenPrompts:
    """Makes prompts from token ids that have a placeholder for each image, as in vLLM.

    The columns of a row are ``token_ids`` (int32), the ``text`` that outputs show as the prompt,
    and ``images``, a list of ``ImageFile``.
    """

    columns: tuple[str, ...] = ("token_ids", "text", "images")

    def __init__(self, settings: ImageSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._processor = settings.processor()
        (self._placeholder,) = self._encoded([self._processor.placeholder])

    def render(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [*rows]

    def tokenize(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt | RowError]:
        """Return a prompt for each row, or its error: ``invalid_image``, or ``unsupported_content``
        if the numbers of placeholders and images differ."""
        return [or_error(self._prompt, row) for row in rows]

    def _prompt(self, row: Mapping[str, Any]) -> Prompt:
        ids, files = row["token_ids"], row["images"]
        starts = self._places_in(ids)
        if len(starts) != len(files):
            raise RowError(
                "unsupported_content",
                f"the prompt has {len(starts)} image placeholders ({self._processor.placeholder}, "
                f"token ids {self._placeholder.tolist()}), but there are {len(files)} images; give "
                "one placeholder for each image, which is expanded to all of the image's tokens",
            )
        images = tuple(opened_image(file, self._settings) for file in files)
        texts = tuple(self._processor.replacement(image.size) for image in images)
        parts: list[TokenIds] = []
        end = 0
        for start, replacement in zip(starts, self._encoded(texts), strict=True):
            parts += [ids[end:start], replacement]
            end = start + len(self._placeholder)
        placed = ImagesInText(
            images, self._processor.placeholder, texts, self._settings.token_id
        ).with_negative_ids(np.concatenate([*parts, ids[end:]]))
        return Prompt(placed, row["text"], False, False, images=images)

    def _places_in(self, ids: TokenIds) -> list[int]:
        """Return the indices in ``ids`` at which a placeholder begins."""
        size = len(self._placeholder)
        if len(ids) < size:
            return []
        windows = np.lib.stride_tricks.sliding_window_view(ids, size)
        starts: list[int] = np.flatnonzero((windows == self._placeholder).all(axis=1)).tolist()
        return starts

    def _encoded(self, texts: Sequence[str]) -> Sequence[TokenIds]:
        if not texts:
            return []
        return self._tokenizer.encode_batch(
            texts, add_special_tokens=False, parse_special_tokens=True
        )
