"""Records of exported files, which show whether the files exist and are complete.

``_batchinfer/openai.json`` has the size and hash of each OpenAI file, and is written after these
files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from batchinfer.errors import DataError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import parse_json, read_file
from batchinfer.job.storage.urls import StorePath


def is_open_file(path: PurePath) -> bool:
    """Return True for a pipe or device such as ``/dev/stdout``, to which lines are appended."""
    file = Path(path)
    if isinstance(path, StorePath) or file.is_dir():
        return False
    return file.parts[:2] in (("/", "dev"), ("/", "proc")) or (file.exists() and not file.is_file())


def exists(out: OutputDir, combined_output: PurePath | None) -> bool:
    """Return True if the OpenAI files were written and still have their recorded sizes.

    Args:
        combined_output: a file with the lines of both OpenAI files, whose size must be the sum of
            their sizes; None if the job writes no such file.
    """
    if combined_output is not None and is_open_file(combined_output):
        return False
    if list(_openai_problems(out, read=False)):
        return False
    if combined_output is None:
        return True
    stat, files = out.files.stat(combined_output), read_record(out, out.openai_record)
    return stat is not None and stat.size == sum(file["size"] for file in files.values())


def problems(out: OutputDir) -> Iterator[str]:
    """Yield the problems of the OpenAI files, if they were written, one per line."""
    if out.files.stat(out.openai_record) is not None:
        yield from _openai_problems(out, read=True)


def _openai_problems(out: OutputDir, *, read: bool) -> Iterator[str]:
    record = read_record(out, out.openai_record)
    files = {path: record.get(path.name) for path in out.openai_files}
    return file_problems(out, out.openai_record, files, read=read)


def read_record(out: OutputDir, path: PurePath) -> dict[str, Any]:
    """Return the JSON object in a record; an empty dict if the record is damaged or missing."""
    with suppress(OSError, ValueError):
        record = parse_json(read_file(out.files, path))
        return record if isinstance(record, dict) else {}
    return {}


def file_problems(
    out: OutputDir, record: PurePath, files: Mapping[PurePath, Any], *, read: bool
) -> Iterator[str]:
    """Yield the problems of recorded files, one per line.

    Args:
        files: the size and sha256 of each file, as read from the record.
        read: True to compare the hashes too.
    """
    for path, facts in files.items():
        try:
            out.check_size(path, int(facts["size"]))
            if read:
                out.check_hash(path, str(facts["sha256"]))
        except DataError as error:
            yield str(error)
        except (KeyError, TypeError, ValueError):
            yield f"{record} is damaged or missing"
            return
