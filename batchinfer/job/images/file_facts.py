"""Detects changes of the image files that rows name, for ``--update``."""

from __future__ import annotations

import os
from hashlib import sha256

from batchinfer.console.phases import phase
from batchinfer.errors import RowError
from batchinfer.job.images.find_row_images import ImageFinder
from batchinfer.job.images.job_images import may_have_images
from batchinfer.job.images.media_files import FILE, media_root
from batchinfer.job.input.dataset import Source
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage.urls import is_url
from batchinfer.text.images.files import ImageFile, ImageFiles, has_scheme

_MOST_EMBEDDED = 64 << 20
"""Maximum bytes of embedded images to read before a row names a file. If no row has named a file by
then, the other rows are assumed to name none and are not read."""


def image_file_facts(spec: JobSpec, source: Source) -> str | None:
    """Return a hash of the sizes and modification times of the image files that rows name, in hex.

    Return None if rows name no files on this machine. Images in object stores and on the web are
    left out, because requesting their modification times would take as long as reading them.

    Raises:
        DataError: the dataset cannot be read.
    """
    root = media_root(spec.input.media_root, source.files[0].path)
    if not may_have_images(spec, source) or is_url(root):
        return None
    finder = ImageFinder(
        spec.prompt, source.schema, _Names(root), holds_requests=source.format.holds_requests
    )
    digest, num_files, embedded = sha256(), 0, 0
    with phase("looking at images", source.num_rows, "rows") as looking:
        for _, rows in source.rows(finder.columns, [source.rows_there]):
            for row in rows:
                for file in () if isinstance(row, RowError) else finder.of(row):
                    if file.path is not None:
                        digest.update(_facts(file.path))
                        num_files += 1
                    embedded += len(file.data or b"")
            looking.advance(len(rows))
            if not num_files and embedded > _MOST_EMBEDDED:
                return None
    return digest.hexdigest() if num_files else None


class _Names(ImageFiles):
    """Joins file names to a folder without checking them, because the files are not read."""

    def __init__(self, root: str) -> None:
        self._root = root

    def elsewhere(self, name: str, where: str) -> ImageFile:
        is_file_url = has_scheme(name, FILE)
        if is_url(name) and not is_file_url:
            return ImageFile(b"")
        path = name[len(FILE) :] if is_file_url else name
        return ImageFile(None, os.path.join(self._root, path))


def _facts(path: str) -> bytes:
    """Return a file's size in bytes and modification time in ns, as text; only ``;`` if the file
    does not exist."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: the name has a zero byte
        return b";"
    return b"%d %d;" % (status.st_size, status.st_mtime_ns)
