"""Output directories opened by their path: on this machine, or in an object store."""

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
    """The output directory that ``output.path`` names.

    Raises:
        UsageError: it cannot be one, or what reads stores is not installed.
        StorageError: the way there cannot be followed.
    """
    return _in_store(path) if is_url(path) else _on_this_machine(path)


def _on_this_machine(path: str) -> OutputDir:
    out = OutputDir(Path(path))
    for inside in (out.success, out.manifest):
        out.files.stat(inside)
    return out


def _in_store(url: str) -> OutputDir:
    """The output directory at ``s3://bucket/folder`` or ``gs://bucket/folder``."""
    root = _root_in_store(url)
    from batchinfer.job.storage.object_filesystem import StoreFiles
    from batchinfer.job.storage.object_lock import StoreLock
    from batchinfer.job.storage.object_store import Objects  # what follows needs obstore

    objects = Objects(root)

    def access(name: str, task: str) -> tuple[Files, Lock]:
        lock = StoreLock(objects, root / "_batchinfer", name=name, task=task)
        return StoreFiles(objects, lock.check, lock.confirm), lock

    return OutputDir(root, access=access).under_lock(LOCK)


def _root_in_store(url: str) -> StorePath:
    root = StorePath(url)
    if scheme_of(url) not in STORES or len(root.parts) < 3:
        raise UsageError(f"{printable(url)} is not a place that output can be in; name a folder")
    connect(root.bucket)
    return root
