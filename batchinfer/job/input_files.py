"""Which files ``input.path`` means."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from batchinfer.errors import DataError, NotYetError, UsageError
from batchinfer.job.messages import printable

_HIDDEN = (".", "_")


def find_files(path: str | Sequence[str]) -> list[Path]:
    """Files meant by ``path``: entries in the order given, globs and directories in path order.

    In directories, which are searched with their subdirectories, and in globs, files and folders
    whose names begin with ``.`` or ``_`` are passed over, unless the glob itself writes that out.

    Raises:
        DataError: an entry that matches no file, or cannot be looked at.
        UsageError: a file named twice.
    """
    entries = [path] if isinstance(path, str) else list(path)
    found = [file for entry in entries for file in _find(entry)]
    for file, times in Counter(found).items():
        if times > 1:
            raise UsageError(f"input.path names {file} {times} times; keep one")
    return found


def _find(entry: str) -> list[Path]:
    try:
        return _expand(entry)
    except OSError as error:  # from names no file can have, and folders that may not be read
        raise DataError(f"input.path: {printable(entry, 200)}: {error.strerror}") from None


def _expand(entry: str) -> list[Path]:
    if "://" in entry:
        raise NotYetError(f"input.path: {entry} (remote files)")
    path = Path(entry)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = _below(path)
    elif glob.has_magic(entry):
        matches = [Path(match) for match in glob.glob(entry, recursive=True)]
        visible = [match for match in matches if not _is_hidden(match, path)]
        found = [f for m in visible for f in (_below(m) if m.is_dir() else [m])]
    elif path.exists():
        raise DataError(f"input.path: {entry} is neither a file nor a folder; give one of them")
    else:
        raise DataError(
            f"input.path: {entry} does not exist",
            hint="check the path; in a job file it is relative to the file's folder",
        )
    if not found:
        raise DataError(
            f"input.path: no Parquet file in {entry}; in a folder, names must end in .parquet"
        )
    return sorted(set(found))


def _is_hidden(match: Path, pattern: Path) -> bool:
    """Whether a glob found something that begins with ``.`` or ``_`` by a wildcard."""
    return any(
        not any(written[0] == part[0] and fnmatchcase(part, written) for written in pattern.parts)
        for part in match.parts
        if part.startswith(_HIDDEN)
    )


def _below(directory: Path) -> list[Path]:
    return [
        file
        for file in directory.rglob("*.parquet")
        if not any(part.startswith(_HIDDEN) for part in file.relative_to(directory).parts)
        and not file.is_dir()
    ]
