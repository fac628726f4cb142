"""Finds the images that rows hold or name, without opening them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pydantic_core import from_json

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError
from batchinfer.job.images.mark_images import mark_of_rows
from batchinfer.text.chat import Message
from batchinfer.text.images.files import ImageFile, ImageFiles
from batchinfer.text.images.find_images import RowImageFiles
from batchinfer.text.prompt_sources import prompt_column
from batchinfer.text.row_values import as_messages, decoded

_REQUEST = "body"
"""Column of OpenAI batch files that holds a request with its conversation."""


class ImageFinder:
    """Finds the images of a job's rows, in the order in which their prompts use them.

    Args:
        config: the job's ``prompt`` section.
        schema: columns of the rows.
        files: resolves the names of images that are not in the row itself.
        holds_requests: True if the rows are requests of OpenAI batch files.
    """

    def __init__(
        self, config: PromptConfig, schema: pa.Schema, files: ImageFiles, *, holds_requests: bool
    ) -> None:
        images = [name for name in config.image_columns if name in schema.names]
        talks = _REQUEST if holds_requests else prompt_column(config, schema.names)
        self._talks = talks if talks in schema.names else None
        found = [*images, *([] if self._talks is None else [self._talks])]
        self.columns = tuple(dict.fromkeys(found))
        """Columns that ``of`` reads."""
        self._mark = mark_of_rows(schema, images)
        self._files = RowImageFiles(files, images)

    def of(self, row: Mapping[str, Any]) -> list[ImageFile]:
        """Return the images of a row; an empty list if the row's prompt cannot be made.

        Args:
            row: values by column. A conversation may also be JSON text.
        """
        row = row if self._mark is None else self._mark(row)
        try:
            found = self._files.in_columns(row)
            messages = [] if self._talks is None else _messages(row.get(self._talks), self._talks)
            return self._files.placed(messages, found)[1] if messages else found
        except RowError:
            return []


def _messages(value: Any, column: str) -> list[Message]:
    """Return the messages of a conversation or a request's body; an empty list for text."""
    if isinstance(value, str | bytes):
        try:
            value = from_json(value)
        except ValueError:
            return []
    if isinstance(value, Mapping):
        value = value.get("messages")
    return as_messages(decoded(value, column), column) if isinstance(value, list) else []
