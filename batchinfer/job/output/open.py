"""Opens output directories by their path or URL."""

from __future__ import annotations

from pathlib import Path

from batchinfer.console.format import printable
from batchinfer.errors import UsageError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.connection import connect
from batchinfer.job.storage.filesystem import Files
from batchinfer.job.storage.local_lock import LOCK, Lock
from batchinfer.job.storage.urls import STORES, StorePath, is_url, scheme_of


def output_at(path: str) -> OutputDir:
    """Return the output directory at a path, or at a URL in an object store.

    Raises:
        UsageError: the path cannot hold output, or the packages for object stores are not
            installed.
        StorageError: the folders on the path cannot be read.
    """
    if is_url(path):
        return _in_store(path)
    out = OutputDir(Path(path))
    for file in (out.success, out.manifest):  # raises an error if the folders cannot be read
        out.files.stat(file)
    return out


def _in_store(url: str) -> OutputDir:
    root = StorePath(url)
    if scheme_of(url) not in STORES or len(root.parts) < 3:
        raise UsageError(f"{printable(url)} cannot hold output; name a folder in a bucket")
    connect(root.bucket)
    from batchinfer.job.storage.object_filesystem import StoreFiles
    from batchinfer.job.storage.object_lock import StoreLock

    # This module is imported only if needed, because it requires obstore.
    from batchinfer.job.storage.object_store import Objects

    objects = Objects(root)

    def access(name: str, task: str) -> tuple[Files, Lock]:
        lock = StoreLock(objects, root / "_batchinfer", name=name, task=task)
        return StoreFiles(objects, lock.check, lock.confirm), lock

    return OutputDir(root, access=access).under_lock(LOCK)
