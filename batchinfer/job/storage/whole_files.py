"""Reads whole small files from object stores and the Hub, without pyarrow.

The processes that read images have little memory, and pyarrow reserves a lot of address space.
"""

from __future__ import annotations

from batchinfer.job.storage.connection import connect, errors
from batchinfer.job.storage.urls import StorePath, scheme_of


def require_store(url: str) -> None:
    """Raise UsageError if the package that reads from a URL's store is not installed."""
    if scheme_of(url) != "hf":
        connect(StorePath(url).bucket, impatient=True)


def read_whole(url: str, most: int) -> bytes:
    """Return the bytes of a file.

    Args:
        most: maximum number of bytes.

    Raises:
        OSError: the file is missing, larger, or may not be read.
        StorageError: the store does not answer within half a minute.
    """
    if scheme_of(url) == "hf":
        from batchinfer.job.storage.hub_reader import read_from_hub

        return read_from_hub(url, most)
    import obstore

    place = StorePath(url)
    with errors(url, "read"):
        found = obstore.get(connect(place.bucket, impatient=True), place.key)
        if found.meta["size"] > most:
            raise OSError(f"it has more than {most} bytes")
        return bytes(found.bytes())
