"""What an output directory holds when a run comes to it: what is left to do, what has to go first.

``look`` changes nothing. ``prepare`` makes the directory ready as far as no finished output has to
go for it. ``start_over`` deletes such output; it is called when nothing is left that could still
keep the job from running.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchinfer.errors import DataError, LockedError
from batchinfer.job.files import storage_errors
from batchinfer.job.manifest import Manifest, Part, read_manifest
from batchinfer.job.messages import printable
from batchinfer.job.output import OutputDir

_STATS_FILES = ("steps.parquet", "requests.parquet")
_PART_FILE = re.compile(r"part-\d{5,}\.parquet")


@dataclass(frozen=True)
class Work:
    """What a run has to do in an output directory."""

    manifest: Manifest
    """The plan; planned when the output was begun, where this run goes on with it."""
    todo: Sequence[Part]
    """Parts to make, in order."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Parts that were finished once and are made again: name, and what is wrong."""
    starts_over: bool = False
    """Whether what is there has to go first."""


def look(out: OutputDir, manifest: Manifest, if_exists: str) -> Work:
    """What is left to do for ``manifest``, without changing anything.

    Args:
        out: the output directory; it may be missing.
        manifest: what this run plans.
        if_exists: ``resume``, ``error`` or ``overwrite``.

    Raises:
        LockedError: the directory holds finished parts of another job, or files of unknown origin.
        DataError: the input has changed since the first part was finished.
    """
    begun = out.manifest.exists()
    if begun and if_exists == "error":
        raise LockedError(f"{out.root} holds output already, and output.if_exists is error")
    overwrites = if_exists == "overwrite"
    if not begun or overwrites:
        _refuse_foreign(out, begun)
    if overwrites or not _has_finished_parts(out):
        starts_over = overwrites or _holds_another_plan(out, manifest)
        return Work(manifest, manifest.parts(), starts_over=starts_over)
    stored = read_manifest(out.manifest)
    stored.check_same_job(manifest, str(out.root))
    plan = replace(manifest, planned_at=stored.planned_at)
    unfinished = dict(_unfinished(out, plan))
    damaged = {part.name: problem for part, problem in unfinished.items() if problem}
    return Work(plan, list(unfinished), damaged)


def prepare(out: OutputDir, work: Work) -> None:
    """Make the directory ready, but for what ``start_over`` does; call it under the lock.

    Raises:
        StorageError: the directory cannot be written to.
    """
    _make_directories(out)
    if not work.starts_over:
        _settle(out, work)


def start_over(out: OutputDir, work: Work) -> None:
    """Delete what this program has put here, if ``work`` asks for that; call it under the lock.

    Raises:
        StorageError: the directory cannot be written to.
    """
    if work.starts_over:
        with storage_errors(out.root):
            _clear(out)
        _make_directories(out)
        _settle(out, work)


def _unfinished(out: OutputDir, manifest: Manifest) -> Iterator[tuple[Part, str | None]]:
    """Parts without a record; parts that are not as their record says, with what is wrong."""
    for part in manifest.parts():
        try:
            if out.finished(part) is not None:
                continue
            problem = f"{out.part_file(part)} has no record" if out.success.exists() else None
        except DataError as error:
            problem = str(error)
        yield part, problem


def _settle(out: OutputDir, work: Work) -> None:
    if not _has_finished_parts(out):
        out.write(out.manifest, work.manifest.to_json())
    if work.todo:
        with storage_errors(out.success):
            out.success.unlink(missing_ok=True)


def _make_directories(out: OutputDir) -> None:
    with storage_errors(out.staging):
        shutil.rmtree(out.staging, ignore_errors=True)
    state = (out.staging, out.steps, out.requests, out.runs, out.logs, out.parts)
    for directory in (out.data, out.stats, *state):
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(13, os.strerror(13))


def _refuse_foreign(out: OutputDir, begun: bool) -> None:
    """Neither mix with nor delete what another program, or a person, has put here."""
    found = [path for path in _listed(out.data) if not _PART_FILE.fullmatch(path.name)]
    if not begun:  # then nothing here is this program's
        named = (out.success, out.summary, *(out.stats / name for name in _STATS_FILES))
        found = [*_listed(out.data), *(path for path in named if path.exists())]
    if found:
        raise LockedError(
            f"{printable(str(found[0]))} is no output of batchinfer",
            hint="use --output for another directory, or move it away",
        )


def _listed(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _holds_another_plan(out: OutputDir, manifest: Manifest) -> bool:
    """Whether what is here was begun for another plan, and none of its parts was finished."""
    if not out.manifest.exists():
        return False
    try:
        begun = read_manifest(out.manifest)
    except DataError:
        return True
    return (begun.fingerprint, begun.inputs) != (manifest.fingerprint, manifest.inputs)


def _has_finished_parts(out: OutputDir) -> bool:
    return any(out.parts.glob("*"))


def _clear(out: OutputDir) -> None:
    """Delete this program's files: what says they are whole first, the manifest last."""
    for path in (out.success, out.summary, out.root / "report.html"):
        path.unlink(missing_ok=True)
    for path in [path for path in _listed(out.data) if _PART_FILE.fullmatch(path.name)]:
        path.unlink()
    for name in _STATS_FILES:
        (out.stats / name).unlink(missing_ok=True)
    keep = {out.manifest, out.state / "lock"}
    for path in set(out.state.iterdir()) - keep:
        _delete(path)
    out.manifest.unlink(missing_ok=True)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
