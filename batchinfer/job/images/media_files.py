"""Finds the images that rows name by path or URL."""

from __future__ import annotations

from pathlib import Path

from batchinfer.errors import JobError, RowError, one_line
from batchinfer.job.storage.urls import StorePath, is_url
from batchinfer.job.storage.whole_files import read_whole, require_store
from batchinfer.text.images.files import INVALID_IMAGE, ImageFile, ImageFiles, has_scheme, shown
from batchinfer.text.row_values import MAX_ROW_BYTES

WEB = ("http://", "https://")
"""Schemes of web addresses."""
FILE = "file://"


def media_root(root: str | None, first_input: str) -> str:
    """Return the folder that image paths are relative to, as a path or URL.

    Args:
        root: ``input.media_root``; None for the folder of the first input file.
        first_input: path or URL of the first input file.
    """
    if root is not None:
        return root
    return str(
        StorePath(first_input).parent
        if is_url(first_input)
        else Path(first_input).absolute().parent
    )


class MediaFiles(ImageFiles):
    """Finds images in a folder and its subfolders.

    Args:
        root: folder that relative paths start from: a path, or a URL if the folder is in a store.
            A name that leads out of this folder is an error.

    Raises:
        UsageError: the package that reads from the store is not installed.
    """

    def __init__(self, root: str) -> None:
        if is_url(root):
            require_store(root)
        self._root = StorePath(root) if is_url(root) else Path(root).resolve()

    def elsewhere(self, name: str, where: str) -> ImageFile:
        if has_scheme(name, *WEB):
            raise RowError(
                INVALID_IMAGE,
                f"{where}: {shown(name)} is a web address; set input.media_urls to download images",
            )
        if isinstance(self._root, StorePath):
            return self._in_store(self._root, name, where)
        is_file_url = has_scheme(name, FILE)
        if is_url(name) and not is_file_url:
            raise RowError(
                INVALID_IMAGE,
                f"{where}: {shown(name)} is in a store; set input.media_root to a folder there",
            )
        path = self._root / (name[len(FILE) :] if is_file_url else name)
        try:
            resolved = path.resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a long name, a zero byte, a loop
            raise RowError(INVALID_IMAGE, f"{where}: {shown(name)!r}: {error}") from None
        if not resolved.is_relative_to(self._root):
            raise self._outside(name, where)
        return ImageFile(None, str(resolved))

    def _in_store(self, root: StorePath, name: str, where: str) -> ImageFile:
        parts: list[str] = []
        for part in (StorePath(name) if is_url(name) else root / name).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        path = StorePath(*parts)
        if path == root or not path.is_relative_to(root):
            raise self._outside(name, where)
        return StoreImage(None, str(path))

    def _outside(self, name: str, where: str) -> RowError:
        return RowError(
            INVALID_IMAGE, f"{where}: {shown(name)} is outside input.media_root, {self._root}"
        )


class StoreImage(ImageFile):
    """An image in an object store or on the Hub; ``path`` is its URL."""

    __slots__ = ()

    def read(self) -> bytes:
        assert self.path is not None
        try:
            return read_whole(self.path, MAX_ROW_BYTES)
        except (OSError, ValueError, JobError) as error:
            raise RowError(INVALID_IMAGE, f"{self.name}: {one_line(error)}") from None
