"""Prepares the images of a job's rows: determines their settings, numbers them, and loads their
pixels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from batchinfer.config import PromptConfig
from batchinfer.errors import ModelError, RowError
from batchinfer.job.images.download import Downloads
from batchinfer.job.images.media_files import MediaFiles, media_root
from batchinfer.job.images.web_images import WebPrompts
from batchinfer.job.input.arrow_types import is_conversation, is_text
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.json_columns import is_json_text
from batchinfer.job.rows.read_prompts import Prompts
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage.urls import StorePath, is_url
from batchinfer.requests.images import ImageLoader, ImageNumbers
from batchinfer.requests.requests import PromptRow
from batchinfer.text.images.image_placeholders import ImageSettings
from batchinfer.text.processes.pool import TextProcesses
from batchinfer.text.prompts import Prompt

if TYPE_CHECKING:
    from batchinfer.builders.context import EngineContext

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class NumberedPrompts:
    """Makes prompts, and numbers their images with ``ImageNumbers``."""

    def __init__(self, prompts: Prompts, numbers: ImageNumbers) -> None:
        self.columns = prompts.columns
        self._prompts = prompts
        self._numbers = numbers

    def start(self, rows: Sequence[Mapping[str, object]]) -> Callable[[], list[Prompt | RowError]]:
        wait = self._prompts.start(rows)
        return lambda: [
            made if isinstance(made, RowError) else self._numbers.numbered(made) for made in wait()
        ]


class JobImages:
    """Makes the prompts of a job whose rows may have images, and loads their pixels. With
    ``downloads``, images are downloaded from web addresses."""

    def __init__(
        self, settings: ImageSettings, processes: TextProcesses, *, downloads: bool
    ) -> None:
        self.settings = settings
        self._processes = processes
        self._numbers = ImageNumbers()
        self._downloads = Downloads() if downloads else None

    def prompts(self, prompts: Prompts, config: PromptConfig) -> Prompts:
        """Wrap ``prompts`` to download the images of rows and to number them."""
        numbered = NumberedPrompts(prompts, self._numbers)
        if self._downloads is None:
            return numbered
        return WebPrompts(numbered, config, self._downloads, self._processes.check_stopped)

    def close(self) -> None:
        if self._downloads is not None:
            self._downloads.close()

    def loaded(
        self, batches: Iterator[list[PromptRow]], is_over: Callable[[], bool]
    ) -> Iterator[list[PromptRow]]:
        """Yield the rows of ``batches`` with their pixels until ``is_over`` returns True."""
        return ImageLoader(self._processes, self.settings, is_over).loaded(batches)


def may_have_images(spec: JobSpec, source: Source) -> bool:
    if not spec.task_spec.draws:
        return False
    return (
        bool(spec.prompt.image_columns)
        or source.format.holds_requests
        or any(map(_may_have_parts, source.schema))
    )


def _may_have_parts(field: pa.Field) -> bool:
    """Return True if a column may hold conversations with content other than text."""
    if is_json_text(field):  # e.g. conversations with both plain texts and lists of parts
        return True
    if not is_conversation(field.type):
        return False
    content = field.type.value_type.field("content").type
    return not (is_text(content) or pa.types.is_null(content))


def image_settings(spec: JobSpec, source: Source, context: EngineContext) -> ImageSettings | None:
    """Return the settings for the images of a job's rows; None if no row has images. Raise
    ModelError if the job has images, but the model takes only text."""
    config, support = spec.prompt, context.images
    if config.image_columns and support is None:
        raise ModelError(
            "prompt.images: this model takes only text, or its images are not supported yet",
            hint="docs/models.md lists the models whose images are supported",
        )
    if support is None or not may_have_images(spec, source):
        return None
    return ImageSettings(
        support.folder,
        support.token_id,
        MediaFiles(media_root(spec.input.media_root, source.files[0].path)),
        config.max_image_pixels,
        config.mm_processor_kwargs,
        _salt(support.folder, config),
        support.merge_size,
        support.attends_both_ways,
    )


def media_root_fact(spec: JobSpec, source: Source) -> str | None:
    """Return ``input.media_root`` for the fingerprint; None if it is not set or rows have no
    images.

    The fingerprint needs the folder, because the same paths name other files in another folder.
    Links are resolved, because a link may lead to another folder in the next run. A moved folder
    counts as another folder, because only reading all images could show that they are unchanged;
    ``--update`` reads them. The default folder is not part of the fingerprint, because it moves
    with the input files.
    """
    if spec.input.media_root is None or not may_have_images(spec, source):
        return None
    root = spec.input.media_root
    return str(StorePath(root) if is_url(root) else Path(root).resolve())


def _salt(folder: Path, config: PromptConfig) -> bytes:
    """Return a hash of all settings that affect the pixels of an image."""
    digest = sha256(json.dumps(dict(config.mm_processor_kwargs), sort_keys=True).encode())
    for name in _PROCESSOR_FILES:
        path = folder / name
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.digest()
