"""How a worker gets at the output: which way its files go, and who lets it write."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from batchinfer.errors import StorageError
from batchinfer.job.fleet.messages import Access
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.open import lent_output, output_at
from batchinfer.job.storage.filesystem import read_file, storage_errors
from batchinfer.job.storage.urls import is_url


@contextmanager
def lent(out: OutputDir) -> Iterator[bytes]:
    """Let workers write to the output; they find there what only the driver can have written."""
    nonce = secrets.token_hex(16).encode()
    out.write(out.permit, nonce)
    try:
        yield nonce
    finally:
        with storage_errors(out.permit, "delete"):
            out.files.delete(out.permit)


def worker_output(path: str, nonce: bytes, worker: str, run_id: str) -> tuple[OutputDir, Access]:
    """Open the output as a worker writes to it, and say where its files go.

    Args:
        path: ``output.path``.
        nonce: what its driver has written there.

    Raises:
        StorageError: this node has another disk, or another store, there than the driver.
    """
    out = output_at(path)
    try:
        found = read_file(out.files, out.permit)
    except OSError:
        found = b""
    if found != nonce:
        raise StorageError(
            f"another output is at {out.root} on this node than on the driver's",
            hint="give all nodes the same endpoint and credentials of the store"
            if is_url(path)
            else "put output.path on a disk that all nodes share, or into an object store",
        )
    if is_url(path):
        lent_out = lent_output(path, out.permit, nonce)
        return lent_out.for_writer(worker, staging=run_id), "store"
    return out.for_writer(worker, staging=run_id), "disk"
