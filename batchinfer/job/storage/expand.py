"""Which names in a folder, or behind a glob, are data, wherever it is; and what is said of none."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath

from batchinfer.errors import DataError

_HIDDEN = (".", "_")


def is_hidden(match: PurePath, pattern: PurePath) -> bool:
    """Whether a glob found something that begins with ``.`` or ``_`` by a wildcard."""
    return any(
        not any(written[0] == part[0] and fnmatchcase(part, written) for written in pattern.parts)
        for part in match.parts
        if part.startswith(_HIDDEN)
    )


def is_data(parts: Sequence[str], suffixes: tuple[str, ...]) -> bool:
    """Whether a file of a searched folder is data, by its path below the folder."""
    return parts[-1].endswith(suffixes) and not any(part.startswith(_HIDDEN) for part in parts)


def no_data(entry: str, suffixes: tuple[str, ...]) -> DataError:
    """There are files, or at least a folder, and no data."""
    endings = " or ".join(suffix for suffix in suffixes if suffix.count(".") == 1)
    return DataError(f"input.path: no data in {entry}; in a folder, names must end in {endings}")


def not_there(entry: str) -> DataError:
    """There is nothing of that name."""
    return DataError(
        f"input.path: {entry} does not exist",
        hint="check the path; in a job file it is relative to the file's folder",
    )
