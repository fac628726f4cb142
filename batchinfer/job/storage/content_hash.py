"""Hashes of local files; hashes of large files are cached in the user's cache folder.

A cached hash is valid while path, size, times and inode stay the same. The hash of a file that has
just changed is not cached, because a second change within the same clock tick would go unnoticed.
The hash of a file with a single chunk is not cached either, because hashing such a file takes no
longer than the lookup.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

_CHUNK_BYTES = 16 << 20
_MOST_THREADS = 8
_SETTLED_S = 2.0
_DIGITS = 64
_FOLDER = "content-hashes"


def content_hash(path: Path, on_read: Callable[[int], object] | None = None) -> str:
    """Hash each 16 MiB chunk of a file with SHA-256; return the SHA-256 of these hashes in hex.

    Args:
        on_read: called in this thread after a chunk was hashed, with its size in bytes.

    Raises:
        OSError: the file cannot be read.
    """
    name = f"{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]}.json"
    before = _identity(path)
    is_large = before["size"] > _CHUNK_BYTES
    digest = _cached(name, before) if is_large else None
    if digest is None:
        digest = _hash(path, on_read)
        if is_large and _identity(path) == before and is_settled(before["mtime_ns"], time.time()):
            _cache(name, before, digest)
    elif on_read is not None:
        on_read(before["size"])
    return digest


def _identity(path: Path) -> dict[str, int]:
    status = path.stat()
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
        "device": status.st_dev,
    }


def is_settled(changed_ns: int, at_s: float) -> bool:
    """Return True if any change of a file after ``at_s`` would change its modification time.

    Args:
        changed_ns: the file's modification time, in nanoseconds since 1970.
        at_s: a time, in seconds since 1970.
    """
    return at_s - changed_ns / 1e9 > _SETTLED_S


def _hash(path: Path, on_read: Callable[[int], object] | None) -> str:
    """Hash chunks in parallel threads, which is faster because hashlib releases the GIL."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        starts = range(0, max(size, 1), _CHUNK_BYTES)
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, len(starts))) as pool:
            chunks = pool.map(partial(_hash_chunk, file.fileno()), starts)
            return hashlib.sha256(b"".join(_counted(chunks, size, on_read))).hexdigest()


def _counted(
    chunks: Iterable[bytes], size: int, on_read: Callable[[int], object] | None
) -> Iterator[bytes]:
    for number, chunk in enumerate(chunks):
        if on_read is not None:
            on_read(min(size - number * _CHUNK_BYTES, _CHUNK_BYTES))
        yield chunk


def _hash_chunk(descriptor: int, start: int) -> bytes:
    chunk = hashlib.sha256()
    end = start + _CHUNK_BYTES
    while start < end and (read := os.pread(descriptor, min(end - start, 1 << 20), start)):
        chunk.update(read)
        start += len(read)
    return chunk.digest()


def _cached(name: str, identity: dict[str, int]) -> str | None:
    folder = _private_folder()
    if folder is None:
        return None
    try:
        stored = json.loads((folder / name).read_bytes())
        if stored["facts"] == identity and len(stored["hash"]) == _DIGITS:
            return str(stored["hash"])
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return None


def _cache(name: str, identity: dict[str, int], digest: str) -> None:
    folder = _private_folder()
    if folder is None:
        return
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder) as scratch:
        new = Path(scratch) / name
        new.write_text(json.dumps({"facts": identity, "hash": digest}))
        os.replace(new, folder / name)


def _private_folder() -> Path | None:
    """Return the cache folder; None if other users can write to it."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(root) if root else Path.home() / ".cache") / "batchinfer" / _FOLDER
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError):  # no home folder, or no permission
        return None
    return folder if status.st_uid == os.getuid() and not status.st_mode & 0o022 else None
