"""Output directories in object stores."""

from __future__ import annotations

from batchinfer.errors import UsageError
from batchinfer.job.connection import connect
from batchinfer.job.messages import printable
from batchinfer.job.output import OutputDir
from batchinfer.job.place import STORES, scheme_of
from batchinfer.job.store_path import StorePath


def output_in_store(url: str) -> OutputDir:
    """The output directory at ``s3://bucket/folder`` or ``gs://bucket/folder``.

    Raises:
        UsageError: no store is meant, or what reads stores is not installed.
    """
    root = StorePath(url)
    if scheme_of(url) not in STORES or len(root.parts) < 3:
        raise UsageError(f"{printable(url)} is not a place that output can be in; name a folder")
    connect(root.bucket)
    from batchinfer.job.objects import Objects  # what follows needs obstore
    from batchinfer.job.store_files import StoreFiles
    from batchinfer.job.store_lock import StoreLock

    objects = Objects(root)
    lock = StoreLock(objects, root / "_batchinfer")
    return OutputDir(root, StoreFiles(objects, lock.check, lock.confirm), lock)
