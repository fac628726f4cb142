"""Replaces an output with its next generation; a later run completes an interrupted swap.

The complete new generation stays in ``_batchinfer/next/NAME`` until all of its files have been
hard-linked into place (copied, in an object store). ``_batchinfer/swap.json`` exists during a swap.
A run that finds ``swap.json`` repeats all steps of the swap under the lock; each step can safely
run twice. ``_SUCCESS`` is deleted first and placed last.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import ClassVar

from pydantic import TypeAdapter

from batchinfer.console.format import printable
from batchinfer.errors import DataError
from batchinfer.job.manifest import read_manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.partitioned import begin, names_of_files
from batchinfer.job.output.resume import PART_FILE, STATS_FILES, clear_staging
from batchinfer.job.storage.failpoints import failpoint
from batchinfer.job.storage.filesystem import STRICT, read_file, storage_errors
from batchinfer.job.storage.local_lock import HOLDER, LOCK


@dataclass(frozen=True)
class Swap:
    """The content of ``swap.json``."""

    __pydantic_config__: ClassVar = STRICT

    generation: str
    is_in_place: bool = False
    """True if all files are in place, and only the folder ``next`` remains to be deleted."""


_STORED = TypeAdapter(Swap)


def put_in_place(out: OutputDir, generation: OutputDir) -> None:
    """Replace the output in ``out`` with a complete generation, under the directory's lock.

    Names of failpoints: ``swap-`` plus ``marked``, ``hidden``, ``copied`` (each file), ``cleared``
    (each folder), ``placed``, ``recorded``, ``deleted`` and ``done``.

    Raises:
        StorageError: a file cannot be written or deleted. The next run continues the swap.
    """
    clear_staging(out)
    _store(out, Swap(generation.root.name))
    failpoint("swap-marked")
    finish_swap(out)


def end_swap(out: OutputDir) -> None:
    """Complete an interrupted swap, if there is one.

    Raises:
        JobError: the swap cannot be completed, or another run holds the lock.
    """
    if out.files.stat(out.swap) is not None:
        with out.locked():
            finish_swap(out)


def finish_swap(out: OutputDir) -> None:
    """Complete an interrupted swap, if there is one. The caller holds the directory's lock.

    Raises:
        DataError: files of the new generation are missing.
        StorageError: a file cannot be written or deleted. The next run continues the swap.
    """
    swap = _stored(out)
    if swap is None:
        return
    if not swap.is_in_place:
        generation = out.generation(swap.generation)
        _check_complete(out, generation)
        with storage_errors(out.root):
            _place(out, generation)
        _store(out, replace(swap, is_in_place=True))
        failpoint("swap-recorded")
    with storage_errors(out.next, "delete"):
        out.files.delete(out.next)
        out.files.sync(out.state)
        failpoint("swap-deleted")
        out.files.delete(out.swap)
        out.files.sync(out.state)
        failpoint("swap-done")


def _place(out: OutputDir, generation: OutputDir) -> None:
    files = out.files
    out.reopen()
    failpoint("swap-hidden")
    clear_staging(out)
    for folder, source in zip(out.folders, generation.folders, strict=True):
        _place_folder(out, folder, source)
    for path, source in zip(out.single_files, generation.single_files, strict=True):
        _place_file(out, path, source)
    _place_partitions(out, generation)
    kept = {*out.folders, *out.single_files, out.partitioned_record, out.staging, out.next}
    kept |= {out.swap, out.locks, out.state / LOCK, out.state / HOLDER}
    kept.add(out.live)  # this run still writes its progress there
    for path in files.entries(out.state):
        if path not in kept:
            files.delete(path)
    files.sync(out.state)
    files.sync(out.root)
    _place_file(out, out.success, generation.success)
    files.sync(out.root)
    failpoint("swap-placed")


def _place_folder(out: OutputDir, folder: PurePath, source: PurePath) -> None:
    """Put the files of ``source`` into a folder, and delete the old generation's files there."""
    files = out.files
    sources = files.entries(source)
    if sources:
        files.make_directory(folder)
    for path in sources:
        files.copy(path, folder / path.name, out.staging)
        failpoint("swap-copied")
    names = {path.name for path in sources}
    for path in files.entries(folder):
        if path.name not in names and _is_ours(out, path):
            files.delete(path)
    if files.stat(folder) is not None:
        files.sync(folder)
    failpoint("swap-cleared")


def _is_ours(out: OutputDir, path: PurePath) -> bool:
    """Return True if batchinfer made this file. Users may have files in the same folder."""
    if path.parent == out.data:
        return PART_FILE.fullmatch(path.name) is not None
    return (
        path.parent not in (out.stats, out.openai)
        or path in out.openai_files
        or (path.parent == out.stats and path.name in STATS_FILES)
    )


def _place_file(out: OutputDir, path: PurePath, source: PurePath) -> None:
    if out.files.stat(source) is None:
        out.files.delete(path)
    else:
        out.files.copy(source, path, out.staging)
        failpoint("swap-copied")


def _place_partitions(out: OutputDir, generation: OutputDir) -> None:
    """Replace the partitioned files with the new generation's files, then replace their record."""
    files, names = out.files, names_of_files(generation)
    is_ours = files.stat(out.partitioned_record) is not None
    if names:  # before copying, record that batchinfer owns all files in the folder
        begin(out, ())
    if is_ours:
        files.delete(out.partitioned)
    for name in names:
        path = out.partitioned / name
        files.make_directory(path.parent)
        files.copy(generation.partitioned / name, path, out.staging)
        failpoint("swap-copied")
    for folder in sorted({(out.partitioned / name).parent for name in names}):
        files.sync(folder)
    _place_file(out, out.partitioned_record, generation.partitioned_record)


def _check_complete(out: OutputDir, generation: OutputDir) -> None:
    """Check that every part has a record, because the present parts are about to be deleted."""
    try:
        plan = read_manifest(generation.manifest, out.files)
        missing = [p.name for p in plan.parts() if out.files.stat(generation.record(p)) is None]
    except DataError:
        missing = [generation.manifest.name]
    if missing:
        raise DataError(
            f"{printable(str(generation.root))} is about to replace the output in "
            f"{printable(str(out.root))}, but its {missing[0]} is missing",
            hint="restore it, or use --overwrite to start over",
        )


def _store(out: OutputDir, swap: Swap) -> None:
    out.write(out.swap, json.dumps(asdict(swap)).encode())


def _stored(out: OutputDir) -> Swap | None:
    if out.files.stat(out.swap) is None:
        return None
    try:
        return _STORED.validate_json(read_file(out.files, out.swap))
    except (OSError, ValueError):
        raise DataError(
            f"{printable(str(out.swap))} is damaged",
            hint="restore it from a backup, or use --overwrite to start over",
        ) from None
