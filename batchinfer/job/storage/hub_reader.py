"""Datasets on the Hugging Face Hub, to read from, through huggingface_hub's file system.

``hf://datasets/OWNER/NAME/PATH``, with ``@REVISION`` after the name. The token and another address
come from the environment (``HF_TOKEN``, ``HF_ENDPOINT``), never from a job.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from batchinfer.console.format import printable
from batchinfer.errors import StorageError
from batchinfer.job.storage.expand import is_data, is_hidden, no_data, not_there
from batchinfer.job.storage.filesystem import FileStat

_SCHEME = "hf://"


class HubStore:
    """See ``batchinfer.job.storage.reader.Store``; paths are URLs."""

    def expand(self, entry: str, suffixes: tuple[str, ...]) -> list[str]:
        """See ``Store``."""
        path = _path(entry)
        with _errors(entry):
            hub = _hub()
            if hub.isfile(path):
                return [entry]
            look = _matching if glob.has_magic(path) else _below
            found = look(hub, path, suffixes)
            if not found and not (glob.has_magic(path) or hub.exists(path)):
                raise not_there(entry)
        if not found:
            raise no_data(entry, suffixes)
        return [_SCHEME + name for name in sorted(found)]

    def stat(self, path: str) -> FileStat:
        """See ``Store``; the mark is the content's hash, times the Hub has none of."""
        with _errors(path):
            found = _hub().info(_path(path), refresh=True, expand_info=True)
        if found["type"] != "file":
            raise OSError("it is not a file")
        large = found["lfs"]
        return FileStat(found["size"], 0, large.sha256 if large else found["blob_id"])

    def open(self, path: str) -> pa.NativeFile:
        """See ``Store``."""
        with _errors(path):
            return pa.PythonFile(_hub().open(_path(path), "rb"), mode="r")


def _hub() -> Any:
    from huggingface_hub import HfFileSystem  # only where it is asked for

    return HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"))


def _path(url: str) -> str:
    return url.removeprefix(_SCHEME).rstrip("/")


def _below(hub: Any, folder: str, suffixes: tuple[str, ...]) -> set[str]:
    """Data in a folder and the folders in it."""
    length = len(PurePosixPath(folder).parts)
    names = hub.find(folder, refresh=True)
    return {name for name in names if is_data(PurePosixPath(name).parts[length:], suffixes)}


def _matching(hub: Any, pattern: str, suffixes: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    for name, kind in hub.glob(pattern, detail=True).items():
        if is_hidden(PurePosixPath(name), PurePosixPath(pattern)):
            continue
        found |= {name} if kind["type"] == "file" else _below(hub, name, suffixes)
    return found


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Tell what is not there, or not given, from a Hub that does not answer."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except FileNotFoundError:
        raise OSError("there is no such file, or it may not be read (HF_TOKEN)") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise OSError(f"the Hub answers {status}") from None
        raise _no_answer(url, f"the Hub answers {status}") from None
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # its name differs between versions
            raise
        raise _no_answer(url, str(error)) from None


def _no_answer(url: str, reason: str) -> StorageError:
    return StorageError(
        f"cannot read {printable(url)}: {printable(reason)}",
        hint="see to the Hub, then run again: finished rows are kept",
    )
