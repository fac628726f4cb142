"""Finds changed input files by comparing the present files with the planned ones.

The comparison covers the content and order of files, and the folder names that become columns.
Locations, other names and times do not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import attrgetter
from pathlib import Path

from batchinfer.console.phases import phase
from batchinfer.errors import DataError
from batchinfer.job.input.format import InputFile
from batchinfer.job.storage.content_hash import content_hash, is_settled

_stat_facts = attrgetter("path", "size", "mtime_ns", "ctime_ns")
_facts = attrgetter("size", "num_rows", "content_sha256", "etag")
_facts_of_before = attrgetter("path", "mtime_ns", "size", "num_rows", "content_sha256", "etag")


def with_content_hashes(
    files: Sequence[InputFile],
    known: Sequence[InputFile] = (),
    known_at_s: float = 0.0,
) -> tuple[InputFile, ...]:
    """Add content hashes to files; files in object stores have ETags instead.

    Args:
        known: files with hashes from an earlier run; unchanged files are not hashed again.
        known_at_s: time when ``known`` was hashed, in seconds since 1970.

    Raises:
        DataError: a file cannot be read.
    """
    before = {_stat_facts(file): file.content_hash for file in known}
    known_files = [_as_known(file, before.get(_stat_facts(file)), known_at_s) for file in files]
    to_hash = [file for file in known_files if file.content_hash is None and file.etag is None]
    with phase("hashing inputs", sum(file.size for file in to_hash), "bytes") as hashing:
        hashes = {file.path: _hash(file.path, hashing.advance) for file in to_hash}
    return tuple(
        replace(file, content_hash=hashes[file.path]) if file.path in hashes else file
        for file in known_files
    )


def same_files(planned: Sequence[InputFile], found: Sequence[InputFile]) -> bool:
    """Return True if the files hold the same rows in the same order."""
    content = _content_of(planned)
    return list(map(content, planned)) == list(map(content, found))


def contents(files: Sequence[InputFile]) -> list[Hashable]:
    """Identify the content of each file by nested tuples of JSON values."""
    return list(map(_content, files))


def have_common_files(planned: Sequence[InputFile], found: Sequence[InputFile]) -> bool:
    """Return True if at least one file now in the input has the content of a planned file."""
    content = _content_of(planned)
    return not set(map(content, planned)).isdisjoint(map(content, found))


def file_differences(planned: Sequence[InputFile], found: Sequence[InputFile]) -> Iterator[str]:
    """Describe the differences between planned and present files, one file per line."""
    if same_files(planned, found):
        return
    content = _content_of(planned)
    there, wanted = (Counter(map(content, files)) for files in (found, planned))
    before, now = _by_name(planned), _by_name(found)
    for name, file in before.items() if there != wanted else ():
        if name in now and content(file) != content(now[name]):
            yield f"{now[name].path} has different content"
        elif name not in now and not there[content(file)]:
            yield f"{file.path} is gone"
    for name, file in now.items() if there != wanted else ():
        if name not in before and not wanted[content(file)]:
            yield f"{file.path} is new"
    pairs = zip(planned, found, strict=False)
    moved = (now.path for was, now in pairs if content(was) != content(now))
    yield f"the files are in a different order, starting with {next(moved, found[-1].path)}"


def _as_known(file: InputFile, known: str | None, known_at_s: float) -> InputFile:
    changed_ns = max(file.mtime_ns, file.ctime_ns)
    if file.content_hash is not None or known is None or not is_settled(changed_ns, known_at_s):
        return file
    return replace(file, content_hash=known)


def _hash(path: str, on_read: Callable[[int], None]) -> str:
    try:
        return content_hash(Path(path), on_read)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _content_of(planned: Sequence[InputFile]) -> Callable[[InputFile], Hashable]:
    is_of_version_before = any(file.partition is None for file in planned)
    return _facts_of_before if is_of_version_before else _content


def _content(file: InputFile) -> Hashable:
    own = tuple(sorted((file.partition or {}).items()))
    return own, file.content_hash or _facts(file)


def _by_name(files: Sequence[InputFile]) -> dict[str, InputFile]:
    """Map each path below the files' common folder to its file, so that the folder may move."""
    folders = [file.path.split("/")[:-1] for file in files]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*folders, strict=False))
    common = len(list(shared))
    return {"/".join(file.path.split("/")[common:]): file for file in files}
