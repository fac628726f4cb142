"""The record of partitioned output, to tell whether it is there and whole.

``_batchinfer/partitioned.json`` has the columns, and size and hash of each file; it is written
after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from batchinfer.console.format import printable
from batchinfer.errors import DataError, LockedError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import parse_json, read_file


def is_there(out: OutputDir, columns: Sequence[str]) -> bool:
    """Whether output was partitioned by these columns, and its files are of the size they had."""
    record = _read(out)
    if not columns:
        return not record
    return record.get("columns") == list(columns) and not list(_problems(out, read=False))


def refuse_foreign(out: OutputDir, columns: Sequence[str]) -> None:
    """Check that the folder to write to is this program's, or not there.

    Args:
        columns: to partition by.

    Raises:
        LockedError: it is another's.
    """
    is_ours = out.files.stat(out.partitioned_record) is not None
    if columns and not is_ours and out.files.entries(out.partitioned):
        raise LockedError(
            f"{printable(str(out.partitioned))} is no output of batchinfer",
            hint="move it away, or use --output for another directory",
        )


def begin(out: OutputDir, columns: Sequence[str]) -> None:
    """Say that the folder is ours, and that nothing in it counts yet.

    Raises:
        StorageError: it cannot be written.
    """
    out.write_json(out.partitioned_record, {"columns": list(columns), "files": None})


def names_of_files(out: OutputDir) -> list[str]:
    """Files that were written, below ``partitioned``; none where that was not done to the end."""
    return list(_read(out).get("files") or {})


def problems(out: OutputDir) -> Iterator[str]:
    """Problems of files that were written, a line each; none while they are being written."""
    is_ended = out.files.stat(out.success) is not None
    record = out.files.stat(out.partitioned_record)
    if record is not None and (is_ended or _read(out).get("files", {}) is not None):
        yield from _problems(out, read=True)


def _read(out: OutputDir) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        record = parse_json(read_file(out.files, out.partitioned_record))
        return record if isinstance(record, dict) else {}
    return {}


def _problems(out: OutputDir, *, read: bool) -> Iterator[str]:
    try:
        files = [(out.partitioned / name, f) for name, f in _read(out)["files"].items()]
        facts = [(path, int(f["size"]), str(f["sha256"])) for path, f in files]
    except (KeyError, TypeError, ValueError, AttributeError):
        yield f"{out.partitioned_record} is damaged or missing"
        return
    for path, size, sha256 in facts:
        try:
            out.check_size(path, size)
            if read:
                out.check_hash(path, sha256)
        except DataError as error:
            yield str(error)
