"""The swap of an output's generations, in steps that may be cut off anywhere and are gone on with.

The new generation is whole, in ``_batchinfer/next/NAME``, and stays so until it is in place, file
by file: by links to the same files here, by copies within the store there. From before the first
step until after the last there is ``_batchinfer/swap.json``, which says whether anything is left to
put in place. Who finds it does all steps again, under the lock: each comes to the same however
often it is done. ``_SUCCESS`` goes first and comes last.
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
from batchinfer.job.output.partitioned.record import begin, names_of_files
from batchinfer.job.output.resume import PART_FILE, STATS_FILES, clear_staging
from batchinfer.job.storage.failpoints import failpoint
from batchinfer.job.storage.filesystem import STRICT, read_file, storage_errors
from batchinfer.job.storage.local_lock import HOLDER, LOCK


@dataclass(frozen=True)
class Swap:
    """What ``swap.json`` says."""

    __pydantic_config__: ClassVar = STRICT

    generation: str
    """Name of the generation that takes the place."""
    is_in_place: bool = False
    """Whether all of it is there, and only what was beside it has to go."""


_STORED = TypeAdapter(Swap)


def is_swapping(out: OutputDir) -> bool:
    """Whether a generation takes the place of another, or did when its run was cut off."""
    return out.files.stat(out.swap) is not None


def put_in_place(out: OutputDir, generation: OutputDir) -> None:
    """Put a generation that is made in the place of what is in ``out``; call it under the lock.

    Failpoints: ``swap-`` and ``marked``, ``hidden``, ``copied`` (each file), ``cleared`` (each
    folder), ``placed``, ``told``, ``gone`` and ``done``.

    Raises:
        StorageError: the file system refuses; the next run goes on.
    """
    clear_staging(out)
    _store(out, Swap(generation.root.name))
    failpoint("swap-marked")
    finish_swap(out)


def finish_swap(out: OutputDir) -> None:
    """Go on with a swap that was cut off, if one was; call it under the lock.

    Raises:
        DataError: the generation is not whole any more.
        StorageError: the file system refuses; the next run goes on.
    """
    swap = _stored(out)
    if swap is None:
        return
    if not swap.is_in_place:
        generation = out.generation(swap.generation)
        _check_whole(out, generation)
        with storage_errors(out.root):
            _place(out, generation)
        _store(out, replace(swap, is_in_place=True))
        failpoint("swap-told")
    with storage_errors(out.next, "delete"):
        out.files.delete(out.next)
        out.files.sync(out.state)
        failpoint("swap-gone")
        out.files.delete(out.swap)
        out.files.sync(out.state)
        failpoint("swap-done")


def _place(out: OutputDir, generation: OutputDir) -> None:
    files = out.files
    files.delete(out.success)
    files.sync(out.root)
    failpoint("swap-hidden")
    clear_staging(out)
    for folder, source in zip(out.folders, generation.folders, strict=True):
        _place_folder(out, folder, source)
    for path, source in zip(out.single_files, generation.single_files, strict=True):
        _place_file(out, path, source)
    _place_partitions(out, generation)
    kept = {*out.folders, *out.single_files, out.partitioned_record, out.staging, out.next}
    kept |= {out.swap, out.locks, out.state / LOCK, out.state / HOLDER}
    kept.add(out.live)  # this run writes there all the while
    for path in files.entries(out.state):
        if path not in kept:
            files.delete(path)
    files.sync(out.state)
    files.sync(out.root)
    _place_file(out, out.success, generation.success)
    files.sync(out.root)
    failpoint("swap-placed")


def _place_folder(out: OutputDir, folder: PurePath, source: PurePath) -> None:
    """Have a folder hold what another one does, and nothing else."""
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
    """Whether this program has put a file where users look."""
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
    """Have the folders by values be those of the generation, or be gone; the record goes last."""
    files, names = out.files, names_of_files(generation)
    is_ours = files.stat(out.partitioned_record) is not None
    if names:  # first: what is there from now on is ours
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


def _check_whole(out: OutputDir, generation: OutputDir) -> None:
    """Check that every part is recorded: what is in place goes for it."""
    try:
        plan = read_manifest(generation.manifest, out.files)
        missing = [p.name for p in plan.parts() if out.files.stat(generation.record(p)) is None]
    except DataError:
        missing = [generation.manifest.name]
    if missing:
        raise DataError(
            f"{printable(str(generation.root))} is to take the place of what is in "
            f"{printable(str(out.root))}, and has no {missing[0]} any more",
            hint="put it back, or use --overwrite to start over",
        )


def _store(out: OutputDir, swap: Swap) -> None:
    out.write(out.swap, json.dumps(asdict(swap)).encode())


def _stored(out: OutputDir) -> Swap | None:
    """What the marker says; None if there is none."""
    if not is_swapping(out):
        return None
    try:
        return _STORED.validate_json(read_file(out.files, out.swap))
    except (OSError, ValueError):
        raise DataError(
            f"{printable(str(out.swap))} is damaged",
            hint="put it back from a backup, or use --overwrite to start over",
        ) from None
