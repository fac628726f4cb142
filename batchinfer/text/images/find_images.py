"""Finds the images of a row in its columns and in its conversation, without opening them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchinfer.errors import RowError
from batchinfer.text.chat import Message
from batchinfer.text.images.files import ImageFile, ImageFiles


class RowImageFiles:
    """Finds the images to which the values of rows refer."""

    def __init__(self, files: ImageFiles, columns: Sequence[str]) -> None:
        self.columns = columns
        self._files = files

    def in_columns(self, row: Mapping[str, object]) -> list[ImageFile]:
        """Return the images in the row's columns, in order.

        Raises:
            RowError: ``invalid_image``.
        """
        return [
            image
            for name in self.columns
            for image in self._files.in_cell(row.get(name), f"column {name}")
        ]

    def placed(
        self, messages: Sequence[Message], in_columns: Sequence[ImageFile]
    ) -> tuple[list[Message], list[ImageFile]]:
        """Return messages with a part for each image, and the images in the order of the parts.

        A part without an image takes the next image from the columns. If there is no such part, the
        images from the columns are put before the text of the first user message.

        Raises:
            RowError: ``invalid_image``; ``unsupported_content``: the number of parts differs from
                the number of images.
        """
        waiting = list(in_columns)
        parts = [part for message in messages for part in image_parts(message)]
        placed = [*messages]
        if waiting and all(part["image"] is not None for part in parts):
            placed = _with_leading_images(messages, len(waiting))
            parts = [part for message in placed for part in image_parts(message)]
        files = []
        for part in parts:
            if part["image"] is not None:
                files += self._files.in_cell(part["image"], "an image of the conversation")
            elif waiting:
                files.append(waiting.pop(0))
            elif self.columns:
                raise RowError(
                    "unsupported_content",
                    "the conversation has more image parts than the row has images",
                )
            else:
                raise RowError(
                    "unsupported_content",
                    "an image part of the conversation has no image; set its field image to one",
                )
        if waiting:
            raise RowError(
                "unsupported_content",
                f"the conversation has no image parts for {len(waiting)} of the row's images",
            )
        return [_without_content(message) for message in placed], files


def image_parts(message: Message) -> Iterator[Mapping[str, Any]]:
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if part["type"] == "image":
            yield part


def _with_leading_images(messages: Sequence[Message], count: int) -> list[Message]:
    """Put ``count`` image parts without images before the text of the first user message."""
    images = [{"type": "image", "image": None}] * count
    placed = [*messages]
    for at, message in enumerate(placed):
        if message["role"] == "user":
            content = message.get("content") or []
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            placed[at] = {**message, "content": [*images, *content]}
            return placed
    raise RowError("unsupported_content", "images need a user message; the conversation has none")


def _without_content(message: Message) -> Message:
    """Drop the content of image parts: a chat template writes only placeholders."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{"type": "image"} if part["type"] == "image" else part for part in content]
    return {**message, "content": parts}
