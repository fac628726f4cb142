"""Hashes of large local files, kept in the user's cache for as long as a file stays as it was.

A file is known again by path, size, times and inode. One that was changed just before it was hashed
is not kept: a second change within the clock's tick would show in none of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

_CHUNK_BYTES = 16 << 20
_MOST_THREADS = 8
_SETTLED_S = 2.0
_DIGITS = 64
_FOLDER = "content-hashes"


def content_hash(path: Path) -> str:
    """SHA-256 of the SHA-256 hashes of a file's chunks of 16 MiB, in hex.

    Raises:
        OSError: the file cannot be read.
    """
    known = _Known(path)
    before = _facts(path)
    found = known.read(before)
    if found is None:
        found = _hash(path)
        if _facts(path) == before and time.time() - before["mtime_ns"] / 1e9 > _SETTLED_S:
            known.write(before, found)
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


def _hash(path: Path) -> str:
    """Threads hash chunk by chunk: hashlib lets others run meanwhile."""
    with path.open("rb", buffering=0) as file:
        starts = range(0, max(os.fstat(file.fileno()).st_size, 1), _CHUNK_BYTES)
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, len(starts))) as pool:
            chunks = pool.map(partial(_hash_chunk, file.fileno()), starts)
            return hashlib.sha256(b"".join(chunks)).hexdigest()


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
