"""This machine's file system, to read from."""

from __future__ import annotations

import glob
from pathlib import Path
from stat import S_ISREG

import pyarrow as pa

from batchinfer.errors import DataError
from batchinfer.job.storage.expand import is_data, is_hidden, no_data, not_there
from batchinfer.job.storage.filesystem import FileStat


class LocalStore:
    """See ``batchinfer.job.storage.reader.Store``."""

    def expand(self, entry: str, suffixes: tuple[str, ...]) -> list[str]:
        """See ``Store``."""
        path = Path(entry)
        if path.is_file():
            return [str(path)]
        if path.is_dir():
            found = _below(path, suffixes)
        elif glob.has_magic(entry):
            matches = [Path(match) for match in glob.glob(entry, recursive=True)]
            visible = [match for match in matches if not is_hidden(match, path)]
            found = [f for m in visible for f in (_below(m, suffixes) if m.is_dir() else [m])]
        elif path.exists():
            raise DataError(f"input.path: {entry} is neither a file nor a folder; give one of them")
        else:
            raise not_there(entry)
        if not found:
            raise no_data(entry, suffixes)
        return [str(file) for file in sorted(set(found))]

    def stat(self, path: str) -> FileStat:
        """See ``Store``."""
        found = Path(path).stat()
        if not S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
            raise OSError("it is not a file")
        return FileStat(found.st_size, found.st_mtime_ns)

    def open(self, path: str) -> pa.NativeFile:
        """See ``Store``."""
        return pa.OSFile(path)


def _below(directory: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return [
        file
        for file in directory.rglob("*")
        if is_data(file.relative_to(directory).parts, suffixes) and not file.is_dir()
    ]
