"""Reads datasets on the Hugging Face Hub through huggingface_hub's file system.

URLs are ``hf://datasets/OWNER/NAME/PATH`` or ``hf://datasets/OWNER/NAME@REVISION/PATH``. The token
and the endpoint come from the environment (``HF_TOKEN``, ``HF_ENDPOINT``), never from a job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal

from batchinfer.console.format import printable
from batchinfer.errors import StorageError
from batchinfer.job.storage.filesystem import FileStat

if TYPE_CHECKING:
    import pyarrow as pa

_SCHEME = "hf://"


class HubStore:
    """The Hugging Face Hub; paths are URLs."""

    def kind(self, path: str) -> Literal["file", "folder"] | None:
        with _errors(path):
            hub = _hub()
            hub.resolve_path(_path(path))  # raises if the dataset does not exist
            try:
                entry = hub.info(_path(path))
            except FileNotFoundError:
                return None
            return "file" if entry["type"] == "file" else "folder"

    def files_below(self, folder: str, suffixes: tuple[str, ...]) -> set[str]:
        with _errors(folder):
            names = _hub().find(_path(folder), refresh=True)
            return {_SCHEME + name for name in names if name.endswith(suffixes)}

    def glob(self, pattern: str, suffixes: tuple[str, ...]) -> set[tuple[str, str]]:
        matches: set[tuple[str, str]] = set()
        with _errors(pattern):
            for name, entry in _hub().glob(_path(pattern), detail=True).items():
                url = _SCHEME + name
                is_file = entry["type"] == "file"
                files = {url} if is_file else self.files_below(url, suffixes)
                matches |= {(url, file) for file in files}
        return matches

    def stat(self, path: str) -> FileStat:
        """Return a file's size and content hash; the Hub reports no modification times."""
        with _errors(path):
            entry = _hub().info(_path(path), refresh=True, expand_info=True)
        if entry["type"] != "file":
            raise OSError("it is not a file")
        return _stat_of(entry)

    def stats_below(self, folder: str) -> Iterator[tuple[str, FileStat]]:
        with _errors(folder):
            entries = _hub().find(_path(folder), detail=True, refresh=True)
        yield from ((_SCHEME + name, _stat_of(entry)) for name, entry in entries.items())

    def open(self, path: str) -> pa.NativeFile:
        # Imported only here, because processes that read images do not need pyarrow.
        import pyarrow as pa

        with _errors(path):
            return pa.PythonFile(_hub().open(_path(path), "rb"), mode="r")


def read_from_hub(url: str, most: int) -> bytes:
    """See ``whole_files.read_whole``."""
    with _errors(url), _hub().open(_path(url), "rb") as file:
        data: bytes = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"it has more than {most} bytes")
    return data


def _stat_of(entry: Any) -> FileStat:
    large = entry["lfs"]
    return FileStat(entry["size"], 0, large.sha256 if large else entry["blob_id"])


def _hub() -> Any:
    from huggingface_hub import HfFileSystem  # imported only if needed, because the import is slow

    return HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"))


def _path(url: str) -> str:
    return url.removeprefix(_SCHEME).rstrip("/")


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turn the Hub's errors into OSError if the Hub refuses, else into StorageError."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except FileNotFoundError:
        raise OSError("the file does not exist, or HF_TOKEN does not allow access") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise OSError(f"the Hub answered with HTTP status {status}") from None
        raise _no_answer(url, f"the Hub answered with HTTP status {status}") from None
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # class names differ between versions
            raise
        raise _no_answer(url, str(error)) from None


def _no_answer(url: str, reason: str) -> StorageError:
    return StorageError(
        f"cannot read {printable(url)}: {printable(reason)}",
        hint="check the network and the Hub, then run again; finished rows are kept",
    )
