"""Detects changes of the image files that rows name, without reading the files."""

from __future__ import annotations

import os
from hashlib import blake2b, sha256

from batchinfer.console.phases import phase
from batchinfer.errors import RowError
from batchinfer.job.images.find_row_images import ImageFinder
from batchinfer.job.images.job_images import may_have_images
from batchinfer.job.images.media_files import FILE, WEB, MediaFiles, media_root
from batchinfer.job.input.dataset import Source
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage.reader import remote_store_of
from batchinfer.job.storage.urls import is_url
from batchinfer.text.images.files import ImageFile, ImageFiles, has_scheme

_MOST_EMBEDDED = 64 << 20
"""Maximum bytes of embedded images to read while no row has named a file. Beyond this limit, the
remaining rows are assumed to name no file either, and are not read."""
_HASH_BYTES = 16


def image_file_facts(spec: JobSpec, source: Source) -> str | None:
    """Return a hash of facts about the image files that rows name, in hex.

    The facts are the sizes and modification times of files on this machine, and the sizes and
    ETags of files in an object store or on the Hub, which come from a listing. Images on the web
    are left out, because each of them would need a request.

    Return None if rows name no files, or if the store refuses to list the files.

    Raises:
        DataError: the dataset cannot be read.
        StorageError: the store does not answer.
    """
    root = media_root(spec.input.media_root, source.files[0].path)
    if not may_have_images(spec, source):
        return None
    files = _NamesInStore(root) if is_url(root) else _Names(root)
    finder = ImageFinder(
        spec.prompt, source.schema, files, holds_requests=source.format.holds_requests
    )
    facts, num_files, embedded = _StoreFacts() if is_url(root) else _LocalFacts(), 0, 0
    with phase("reading sizes and times of image files", source.num_rows, "rows") as progress:
        for _, rows in source.rows(finder.columns, [source.rows_there]):
            for row in rows:
                for file in () if isinstance(row, RowError) else finder.of(row):
                    if file.path is not None:
                        facts.add(file.path)
                        num_files += 1
                    embedded += len(file.data or b"")
            progress.advance(len(rows))
            if not num_files and embedded > _MOST_EMBEDDED:
                return None
    return facts.digest() if num_files else None


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


class _NamesInStore(MediaFiles):
    """Joins names to the URL of a folder in a store, and skips web addresses."""

    def elsewhere(self, name: str, where: str) -> ImageFile:
        return ImageFile(b"") if has_scheme(name, *WEB) else super().elsewhere(name, where)


class _LocalFacts:
    """Hashes the sizes in bytes and the modification times in ns of files on this machine."""

    def __init__(self) -> None:
        self._hash = sha256()

    def add(self, path: str) -> None:
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: the name has a zero byte
            self._hash.update(b";")
        else:
            self._hash.update(b"%d %d;" % (status.st_size, status.st_mtime_ns))

    def digest(self) -> str:
        return self._hash.hexdigest()


class _StoreFacts:
    """Hashes the sizes and ETags of files in a store.

    The sizes and ETags come from listing the innermost folder that contains all files, at up to
    1,000 files per request. The digest is the sum of the files' hashes, so the order of the files
    does not matter, and only hashes of the names are kept in memory.
    """

    def __init__(self) -> None:
        self._names = set[bytes]()
        self._folder: str | None = None
        """The common folder of all names, with a slash at the end."""

    def add(self, url: str) -> None:
        folder = self._folder or url
        while not url.startswith(folder) or folder == url:
            folder = folder[: folder.rindex("/", 0, -1) + 1]
        self._folder = folder
        self._names.add(_hash(url))

    def digest(self) -> str | None:
        assert self._folder is not None
        total = 0
        try:
            for url, stat in remote_store_of(self._folder).stats_below(self._folder):
                if _hash(url) in self._names:
                    changing = stat.etag or stat.mtime_ns
                    total += int.from_bytes(_hash(f"{url} {stat.size} {changing}"))
        except OSError:  # rows can name files even if the store does not allow listing them
            return None
        return f"{total % (1 << 8 * _HASH_BYTES):0{2 * _HASH_BYTES}x}"


def _hash(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
