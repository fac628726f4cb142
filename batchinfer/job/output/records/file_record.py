"""The record of an ended job's files, by which ``verify`` detects every change to a file.

Each part's record has the hash of the part's file. ``_batchinfer/files.json`` has the sizes and
hashes of the other files: statistics, summary, part records, keys, and the files of the runs. A run
writes ``files.json`` just before ``_SUCCESS``, and ``OutputDir.reopen`` deletes ``files.json``
before a file changes. The copy ``files-copy.json`` reveals that the record itself is damaged or
missing. Outputs that older versions finished have no such record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import PurePath
from typing import ClassVar

from pydantic import NonNegativeInt, TypeAdapter

from batchinfer.console.format import first_line
from batchinfer.errors import DataError, StorageError
from batchinfer.job.fingerprint import digest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import STATS_FILES
from batchinfer.job.storage.filesystem import STRICT, parse_json, read_file, sha256_of

_SEAL = b"<!-- sha256: "
_SEAL_END = b" -->\n"


@dataclass(frozen=True)
class FileFacts:
    __pydantic_config__: ClassVar = STRICT

    size: NonNegativeInt
    sha256: str


@dataclass(frozen=True)
class FileRecord:
    """The files of an output whose job has ended."""

    __pydantic_config__: ClassVar = STRICT

    has_success: bool
    """True if ``_SUCCESS`` was written next; False if too many rows failed or too few succeeded."""
    has_report: bool
    """True if there was a sealed report; the report's hash is in the report itself, which may be
    written again at any time."""
    files: dict[str, FileFacts]
    """Size and hash of each file, keyed by the path relative to the output directory."""


_STORED = TypeAdapter(FileRecord)


def sealed(html: bytes) -> bytes:
    """Return a report with its own hash appended, so that ``verify`` can check it."""
    return html + _SEAL + hashlib.sha256(html).hexdigest().encode() + _SEAL_END


def record_files(out: OutputDir, *, has_success: bool, open_runs: Iterable[str]) -> None:
    """Record the files of an ended job. The caller holds the directory's lock.

    Args:
        has_success: True if the caller writes ``_SUCCESS`` next.
        open_runs: ids of runs whose files are left out, because their writers may still write.
    """
    statistics = (out.stats / name for name in STATS_FILES)
    singles = [*out.single_files, out.partitioned_record, *statistics]
    recorded_elsewhere = {out.report, *out.file_records}
    paths = [path for path in singles if path not in recorded_elsewhere]
    paths = [path for path in paths if out.files.stat(path) is not None]
    open_names = tuple(f"{run}{end}" for run in open_runs for end in ".-")
    for folder in (out.parts, out.keys, out.steps, out.runs, out.logs):
        entries = out.files.entries(folder)
        paths += [path for path in entries if not path.name.startswith(open_names)]
    names = ["/".join(path.relative_to(out.root).parts) for path in paths]
    facts = dict(zip(names, out.of_each(partial(_facts, out), paths), strict=True))
    record = asdict(FileRecord(has_success, _is_report_whole(out), facts))
    for path in out.file_records:
        out.write_json(path, {"sha256": digest(record), "record": record})


def missing_files(out: OutputDir) -> Iterator[PurePath]:
    """Yield the missing files among the recorded files, the record itself, and its copy."""
    record = _stored(out)
    if record is None:
        return
    paths = [*out.file_records, *(out.root / name for name in record.files)]
    if record.has_report:
        paths.append(out.report)
    folders = {path.parent for path in paths}
    present = {path for folder in folders for path in out.files.entries(folder)}
    yield from (path for path in paths if path not in present)


def has_record(out: OutputDir) -> bool:
    """Return True if the files of an ended job are recorded, even if the record is damaged."""
    return any(out.files.stat(path) is not None for path in out.file_records)


def changed_files(out: OutputDir) -> dict[PurePath, str]:
    """Return what is wrong with each file that was changed or deleted after it was recorded."""
    problems = {path: _record_problem(out, path) for path in out.file_records}
    if not has_record(out):
        return {}
    record = _stored(out)
    if record is not None:
        facts = {out.root / name: facts for name, facts in record.files.items()}
        if record.has_success:
            facts[out.success] = FileFacts(0, hashlib.sha256().hexdigest())
        found = out.of_each(lambda path: _file_problem(out, path, facts[path]), facts)
        problems |= dict(zip(facts, found, strict=True))
        if record.has_report:
            problems[out.report] = _report_problem(out)
    return {path: problem for path, problem in problems.items() if problem is not None}


def _facts(out: OutputDir, path: PurePath) -> FileFacts:
    stat = out.files.stat(path)
    assert stat is not None
    return FileFacts(stat.size, sha256_of(out.files, path))


def _file_problem(out: OutputDir, path: PurePath, facts: FileFacts) -> str | None:
    try:
        out.check_size(path, facts.size)
        out.check_hash(path, facts.sha256)
    except (DataError, StorageError) as error:
        return first_line(error)
    return None


def _is_report_whole(out: OutputDir) -> bool:
    try:
        data = read_file(out.files, out.report)
    except OSError:
        return False
    return data == sealed(data.rpartition(_SEAL)[0])


def _report_problem(out: OutputDir) -> str | None:
    if out.files.stat(out.report) is None:
        return f"{out.report} is missing"
    return None if _is_report_whole(out) else f"{out.report} has changed since it was written"


def _read(out: OutputDir, path: PurePath) -> FileRecord:
    """Return the record in a file. Raise ValueError if the file is damaged, OSError if it is
    missing."""
    stored = parse_json(read_file(out.files, path))
    if not isinstance(stored, dict) or stored.keys() != {"sha256", "record"}:
        raise ValueError("it is not a record of files")
    if digest(stored["record"]) != stored["sha256"]:
        raise ValueError("its hash differs")
    return _STORED.validate_json(json.dumps(stored["record"]))


def _record_problem(out: OutputDir, path: PurePath) -> str | None:
    try:
        _read(out, path)
    except OSError:
        return f"{path} is missing"
    except ValueError:
        return f"{path} is damaged"
    return None


def _stored(out: OutputDir) -> FileRecord | None:
    for path in out.file_records:
        with suppress(OSError, ValueError):
            return _read(out, path)
    return None
