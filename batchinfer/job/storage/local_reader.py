"""Files of this machine's file system, to read from."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from stat import S_ISREG
from typing import Literal

import pyarrow as pa

from batchinfer.job.storage.filesystem import FileStat


class LocalStore:
    """The file system as a ``batchinfer.job.storage.reader.Store``."""

    def kind(self, path: str) -> Literal["file", "folder", "other"] | None:
        found = Path(path)
        if found.is_file():
            return "file"
        if found.is_dir():
            return "folder"
        return "other" if found.exists() else None

    def files_below(self, folder: str, suffixes: tuple[str, ...]) -> set[str]:
        return {
            os.path.join(directory, name)
            for directory, _, names in os.walk(Path(folder))
            for name in names
            if name.endswith(suffixes)
        }

    def glob(self, pattern: str, suffixes: tuple[str, ...]) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for match in glob.iglob(pattern, recursive=True):
            files = self.files_below(match, suffixes) if os.path.isdir(match) else {match}
            found |= {(match, file) for file in files}
        return found

    def stat(self, path: str) -> FileStat:
        found = Path(path).stat()
        if not S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
            raise OSError("it is not a file")
        return FileStat(found.st_size, found.st_mtime_ns)

    def open(self, path: str) -> pa.NativeFile:
        return pa.OSFile(path)
