"""Hashes of large local files, kept in the user's cache for as long as a file stays as it was.

A file is known again by path, size, times and inode. One that was changed just before it was hashed
is not kept: a second change within the clock's tick would show in none of these. Nor is a file of
one chunk, which is hashed as soon as looked up.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

_CHUNK_BYTES = 16 << 20
_MOST_THREADS = 8
_SETTLED_S = 2.0
_DIGITS = 64
_FOLDER = "content-hashes"


def content_hash(path: Path, on_read: Callable[[int], object] | None = None) -> str:
    """SHA-256 of the SHA-256 hashes of a file's chunks of 16 MiB, in hex.

    Args:
        on_read: told of each number of bytes more that are hashed, in this thread.

    Raises:
        OSError: the file cannot be read.
    """
    known = _Known(path)
    before = _facts(path)
    is_large = before["size"] > _CHUNK_BYTES
    found = known.read(before) if is_large else None
    if found is None:
        found = _hash(path, on_read)
        if is_large and _facts(path) == before and is_settled(before["mtime_ns"], time.time()):
            known.write(before, found)
    elif on_read is not None:
        on_read(before["size"])
    return found


def _facts(path: Path) -> dict[str, int]:
    """What changes when a file does, but for whoever sets it all back."""
    found = path.stat()
    return {
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
        "device": found.st_dev,
    }


def is_settled(changed_ns: int, at_s: float) -> bool:
    """Whether a file that was changed last at one time would show, at another, a change since.

    Args:
        changed_ns: nanoseconds since 1970.
        at_s: seconds since 1970.
    """
    return at_s - changed_ns / 1e9 > _SETTLED_S


def _hash(path: Path, on_read: Callable[[int], object] | None) -> str:
    """Threads hash chunk by chunk: hashlib lets others run meanwhile."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        starts = range(0, max(size, 1), _CHUNK_BYTES)
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, len(starts))) as pool:
            chunks = pool.map(partial(_hash_chunk, file.fileno()), starts)
            return hashlib.sha256(b"".join(_counted(chunks, size, on_read))).hexdigest()


def _counted(
    chunks: Iterable[bytes], size: int, on_read: Callable[[int], object] | None
) -> Iterator[bytes]:
    """Hashes of chunks, the bytes of each told as it comes."""
    left = size
    for chunk in chunks:
        if on_read is not None:
            on_read(min(left, _CHUNK_BYTES))
        left -= _CHUNK_BYTES
        yield chunk


def _hash_chunk(descriptor: int, start: int) -> bytes:
    chunk = hashlib.sha256()
    end = start + _CHUNK_BYTES
    while start < end and (read := os.pread(descriptor, min(end - start, 1 << 20), start)):
        chunk.update(read)
        start += len(read)
    return chunk.digest()


class _Known:
    """What is kept of one file; nothing where there is no cache of one's own."""

    def __init__(self, path: Path) -> None:
        name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
        self._name = f"{name}.json"

    def read(self, facts: dict[str, int]) -> str | None:
        """The hash of the file as it is now, if it is known."""
        for folder in _own_folder():
            try:
                kept = json.loads((folder / self._name).read_bytes())
                if kept["facts"] == facts and len(kept["hash"]) == _DIGITS:
                    return str(kept["hash"])
            except (OSError, ValueError, TypeError, KeyError):
                continue
        return None

    def write(self, facts: dict[str, int], found: str) -> None:
        for folder in _own_folder():
            try:
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    new = Path(scratch) / self._name
                    new.write_text(json.dumps({"facts": facts, "hash": found}))
                    os.replace(new, folder / self._name)
            except OSError:
                continue  # it is hashed again next time


def _own_folder() -> Iterator[Path]:
    """The folder that hashes are kept in, if nobody else can write to it."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(root) if root else Path.home() / ".cache") / "batchinfer" / _FOLDER
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError):  # no home, or no right
        return
    if status.st_uid == os.getuid() and not status.st_mode & 0o022:
        yield folder
