"""Makes thumbnails: small copies of rows' images for the page of a report."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError, UsageError
from batchinfer.job.images.find_row_images import ImageFinder
from batchinfer.job.images.media_files import MediaFiles, StoreImage, media_root
from batchinfer.job.images.time_limit import within
from batchinfer.text.images.files import INVALID_IMAGE, ImageFile, ImageFiles

MOST_PICTURES = 4
"""Maximum number of pictures per row."""
LONGEST_SIDE = 320
"""Maximum width and height of a picture on the page, in pixels."""
STORE_S = 10.0
"""Maximum number of seconds that the page waits for images in object stores."""
_MOST_BYTES = 32 << 20
"""Maximum size of a row's value; larger values are not read."""
_PROMPT_KEYS = ("column", "template", "messages", "images", "max_image_pixels")


class Pictures:
    """Finds the images of a job's rows.

    Args:
        job: the job's resolved configuration.
        first_input: path or address of the first input file.
    """

    def __init__(self, job: Mapping[str, Any], first_input: str) -> None:
        prompt, entry = job.get("prompt") or {}, job.get("input") or {}
        known = {name: prompt[name] for name in _PROMPT_KEYS if prompt.get(name) is not None}
        self._config = PromptConfig(**known)
        self._holds_requests = entry.get("format") == "openai-batch"
        renamed = (job.get("output") or {}).get("rename") or {}
        self._input_names: dict[str, str] = {new: old for old, new in renamed.items()}
        self.columns: Sequence[str] = [
            renamed.get(name, name) for name in self._config.image_columns
        ]
        """Output columns that only hold images."""
        self._files = _files(media_root(entry.get("media_root"), first_input))
        self._store_s = STORE_S
        self._can_decode = find_spec("PIL") is not None

    def read_columns(self, schema: pa.Schema) -> list[str]:
        """Return the columns of an output with ``schema`` that ``of`` reads."""
        if not self._can_decode:
            return []
        needed = self._finder(schema).columns
        return [name for name in schema.names if self._input_name(name) in needed]

    def of(self, row: pa.RecordBatch) -> list[str]:
        """Return data URLs of a row's pictures. Images that can no longer be read are left out."""
        pictures: list[str] = []
        finder = self._finder(row.schema)
        columns = self.read_columns(row.schema)
        values = {
            self._input_name(name): row.column(name)[0].as_py()
            for name in columns
            if row.column(name).nbytes <= _MOST_BYTES
        }
        for file in finder.of(values) if values else ():
            if len(pictures) < MOST_PICTURES:
                with suppress(RowError):
                    pictures.append(_data_url(self._read(file), self._config.max_image_pixels))
        return pictures

    def _finder(self, schema: pa.Schema) -> ImageFinder:
        named = pa.schema([field.with_name(self._input_name(field.name)) for field in schema])
        return ImageFinder(self._config, named, self._files, holds_requests=self._holds_requests)

    def _input_name(self, column: str) -> str:
        return self._input_names.get(column, column)

    def _read(self, file: ImageFile) -> bytes:
        if not isinstance(file, StoreImage):
            return file.read()
        if not self._store_s:
            raise RowError(INVALID_IMAGE, f"{file.name} comes too late for the page")
        end = time.monotonic() + self._store_s
        try:
            return within(self._store_s, file.read)
        except (TimeoutError, OSError) as error:
            raise RowError(INVALID_IMAGE, str(error)) from None
        finally:
            self._store_s = max(0.0, end - time.monotonic())


class _ShownFiles(MediaFiles):
    """Finds images like ``MediaFiles``, but returns an empty image for names that it refuses."""

    def elsewhere(self, name: str, where: str) -> ImageFile:
        with suppress(RowError):
            return super().elsewhere(name, where)
        return ImageFile(b"")


def _files(root: str) -> ImageFiles:
    try:
        return _ShownFiles(root)
    except UsageError:  # the package that reads from the store is not installed
        return ImageFiles()


def _data_url(data: bytes, max_pixels: int) -> str:
    from batchinfer.text.images.decode import OpenImage

    picture = OpenImage(data, max_pixels, "an image").pixels()
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
