"""Finds the images that rows name by paths and web addresses."""

from __future__ import annotations

from pathlib import Path

from batchinfer.errors import RowError
from batchinfer.job.images.download import downloaded
from batchinfer.text.images.files import INVALID_IMAGE, ImageFile, ImageFiles

_WEB = ("http://", "https://")


class MediaFiles(ImageFiles):
    """Finds images below a folder, and images on the web.

    Args:
        root: folder of relative paths. A path that leads out of it is an error. None: every path is
            an error.
        downloads: True to download images from web addresses.
    """

    def __init__(self, root: Path | None, *, downloads: bool = False) -> None:
        self._root = None if root is None else root.resolve()
        self._downloads = downloads

    def elsewhere(self, name: str, where: str) -> ImageFile:
        if name.startswith(_WEB):
            if self._downloads:
                return ImageFile(downloaded(name, where))
            raise RowError(
                INVALID_IMAGE,
                f"{where}: {name[:80]} is a web address; set input.media_urls to download images",
            )
        if self._root is None:
            raise RowError(
                INVALID_IMAGE,
                f"{where}: {name[:80]} is a path, but there is no folder for images; "
                "set input.media_root",
            )
        path = self._root / name.removeprefix("file://")
        try:
            resolved = path.resolve()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, a loop
            raise RowError(INVALID_IMAGE, f"{where}: {name[:80]!r}: {error}") from None
        if not resolved.is_relative_to(self._root):
            raise RowError(
                INVALID_IMAGE, f"{where}: {name[:80]} is outside input.media_root, {self._root}"
            )
        return ImageFile(None, str(resolved))
