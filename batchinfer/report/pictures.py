"""Makes small copies of rows' images for the page of a report."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError
from batchinfer.job.images.cells import marked
from batchinfer.job.images.media_files import MediaFiles
from batchinfer.job.storage.urls import is_url
from batchinfer.text.images.files import ImageFiles

MOST_PICTURES = 4
"""Maximum number of pictures per row."""
LONGEST_SIDE = 320
"""Maximum width and height of a picture on the page, in pixels."""
_MOST_BYTES = 32 << 20
"""Maximum size of a row's images; larger cells are not read."""


class Pictures:
    """Finds the images of a job's rows.

    Args:
        job: the job's resolved configuration.
        first_input: path or address of the first input file.
    """

    def __init__(self, job: Mapping[str, Any], first_input: str) -> None:
        prompt, media_root = job.get("prompt") or {}, (job.get("input") or {}).get("media_root")
        columns = prompt.get("images") or ()
        self.columns: Sequence[str] = [columns] if isinstance(columns, str) else columns
        self._max_pixels = prompt.get("max_image_pixels") or PromptConfig().max_image_pixels
        root = media_root or os.path.dirname(os.path.abspath(first_input))
        # Do not read from stores, because they could delay the page.
        in_store = is_url(media_root or first_input)
        self._files = ImageFiles() if in_store else MediaFiles(root)
        if find_spec("PIL") is None:
            self.columns = ()

    def of(self, row: pa.RecordBatch) -> list[str]:
        """Return data URLs of a row's pictures. Images that can no longer be read are left out."""
        pictures: list[str] = []
        for name in self.columns:
            if name not in row.schema.names or row.column(name).nbytes > _MOST_BYTES:
                continue
            with suppress(RowError):
                cell = marked(row.column(name)[0].as_py(), row.schema.field(name).type)
                for file in self._files.in_cell(cell, name):
                    if len(pictures) < MOST_PICTURES:
                        pictures.append(_data_url(file.read(), self._max_pixels))
        return pictures


def _data_url(data: bytes, max_pixels: int) -> str:
    from batchinfer.text.images.decode import OpenImage

    picture = OpenImage(data, max_pixels, "an image").pixels()
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
