"""Resuming an output directory: parts that are left to make, output that has to go first.

``plan_resume`` changes nothing. ``prepare_directory`` makes the directory ready as far as no
finished output has to go for it. ``clear_output`` deletes such output; it is called when nothing is
left that could still keep the job from running. ``batchinfer.job.output.recovery`` finds what
earlier runs have left of unfinished parts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from batchinfer.console.format import near_path, printable
from batchinfer.errors import DataError, LockedError
from batchinfer.job.manifest import LAYOUT, Manifest
from batchinfer.job.output.directory import OutputDir, Trust
from batchinfer.job.output.manifest_file import (
    is_begun,
    restore_manifest,
    store_manifest,
    stored_manifest,
)
from batchinfer.job.row_ids import Part
from batchinfer.job.storage.filesystem import storage_errors
from batchinfer.job.storage.local_lock import HOLDER, LOCK

STATS_FILES = ("steps.parquet", "requests.parquet")
"""Names of the tables of a job that has ended."""
PART_FILE = re.compile(r"part-\d{5,}\.parquet")
"""Names of parts."""


@dataclass(frozen=True)
class ResumePlan:
    """Parts that a run has to make in an output directory, and output that has to go first."""

    manifest: Manifest
    """The plan; planned when the output was begun, where this run goes on with it."""
    todo: Sequence[Part]
    """Parts to make, in order."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Parts that were finished once and are made again: name, and what is wrong."""
    starts_over: bool = False
    """Whether what is there has to go first."""
    owned: range | None = None
    """Indices of the parts that this run makes and no other; None: of all."""
    takes_over: Sequence[OutputDir] = ()
    """Outputs that this one is to take the place of: their rows stay where nothing changed."""

    @property
    def begins(self) -> bool:
        """Whether none of the parts is finished that this run makes."""
        owned = self.manifest.parts() if self.owned is None else self.owned
        return len(self.todo) == len(owned)


def plan_resume(
    out: OutputDir, manifest: Manifest, if_exists: str, trust: Trust = "marks"
) -> ResumePlan:
    """The parts that are left to make for ``manifest``; nothing is changed.

    Args:
        out: the output directory; it may be missing.
        manifest: what this run plans.
        if_exists: ``resume``, ``error`` or ``overwrite``.
        trust: what saves reading parts that are finished.

    Raises:
        LockedError: the directory holds finished rows of another job, or files of unknown origin.
        DataError: the input has changed since the first part was finished.
    """
    agreed = agree_on_plan(out, manifest, if_exists)
    if agreed.starts_over or not has_finished_rows(out):
        return agreed
    return only_unfinished(out, agreed, trust)


def agree_on_plan(out: OutputDir, manifest: Manifest, if_exists: str) -> ResumePlan:
    """The plan of a run as ``plan_resume`` finds it, with all parts to make: none is looked at.

    Raises:
        LockedError, DataError: as ``plan_resume``.
    """
    begun = is_begun(out)
    if if_exists != "overwrite":
        refuse_half_an_update(out)
    if begun and if_exists == "error":
        raise LockedError(
            f"{printable(str(out.root))} holds output already, and output.if_exists is error",
            hint="use --output for another directory, or set if_exists to resume or overwrite",
        )
    overwrites = if_exists == "overwrite"
    if not begun or overwrites:
        _refuse_foreign(out, begun)
    if overwrites or not has_finished_rows(out):
        starts_over = overwrites or (begun and not holds_plan(out, manifest))
        if not starts_over:
            refuse_unexpected_files(out, manifest)
            if begun:  # what others may have begun to go by
                manifest = replace(manifest, planned_at=stored_manifest(out).planned_at)
        return ResumePlan(manifest, manifest.parts(), starts_over=starts_over)
    stored = stored_manifest(out)
    stored.check_same_job(manifest, str(out.root))
    refuse_unexpected_files(out, stored)
    plan = replace(
        manifest, planned_at=stored.planned_at, fingerprint=stored.fingerprint, job=stored.job
    )
    return ResumePlan(plan, plan.parts())


def only_unfinished(out: OutputDir, work: ResumePlan, trust: Trust = "marks") -> ResumePlan:
    """``work`` without the parts that are finished.

    Args:
        trust: what saves reading these.

    Raises:
        LockedError: another version has begun the output, and its rows cannot be gone on with.
    """
    unfinished = dict(_unfinished(out, work.todo, trust))
    damaged = {part.name: problem for part, problem in unfinished.items() if problem}
    if len(damaged) < len(unfinished) and stored_manifest(out).layout != LAYOUT:
        raise LockedError(
            f"{printable(str(out.root))} was begun by another version of batchinfer, and is not "
            "finished",
            hint="finish it with that version, or use --output for another place, with --reuse for "
            "its rows, or --overwrite to start over",
        )
    return replace(work, todo=list(unfinished), damaged=damaged)


def prepare_directory(out: OutputDir, work: ResumePlan, shared: OutputDir | None = None) -> None:
    """Make the directory ready, but for what ``clear_output`` does; call it under the lock.

    Args:
        shared: the directory as it is written to under the lock of all, for what all go by; None:
            ``out``.

    Raises:
        LockedError: another run has taken over that lock.
        StorageError: the directory cannot be written to.
    """
    _make_directories(out)
    if not work.starts_over:
        _store_plan(shared or out, work)


def clear_output(out: OutputDir, work: ResumePlan) -> None:
    """Delete what this program has put here, if ``work`` asks for that; call it under the lock.

    Raises:
        StorageError: the directory cannot be written to.
    """
    if work.starts_over:
        with storage_errors(out.root, "delete"):
            _clear(out)
        _make_directories(out)
        _store_plan(out, work)


def refuse_half_an_update(out: OutputDir) -> None:
    """Check that what is here is of one generation.

    Raises:
        LockedError: another one is being put in its place.
    """
    if _is_there(out, out.swap):
        raise LockedError(
            f"{printable(str(out.root))} is being updated, and holds files of two generations",
            hint="if no run is at it, run the job again, without --shard: that ends the update",
        )


def plan_of(out: OutputDir) -> Manifest:
    """The plan of the job that writes, or wrote, to ``out``.

    Raises:
        DataError: there is none, or it and its copy are damaged.
    """
    if not is_begun(out):
        raise DataError(
            f"{printable(str(out.root))} holds no output of batchinfer"
            f"{'' if out.files.stat(out.root) else near_path(out.root)}",
            hint="give the folder that output.path of the job file names",
        )
    return stored_manifest(out)


def unexpected_files(out: OutputDir, manifest: Manifest) -> list[PurePath]:
    """Files among the parts that are none of ``manifest``'s."""
    planned = {out.part_file(part) for part in manifest.parts()}
    return [path for path in out.files.entries(out.data) if path not in planned]


def refuse_unexpected_files(out: OutputDir, manifest: Manifest) -> None:
    """Check that every Parquet file among the parts is one: readers take it for output.

    Raises:
        LockedError: one is no part of ``manifest``.
    """
    for path in unexpected_files(out, manifest):
        if path.suffix == ".parquet":
            raise LockedError(
                f"{printable(str(path))} is no part of this job; readers would take it for one",
                hint="move it away, then run again",
            )


def _unfinished(
    out: OutputDir, parts: Sequence[Part], trust: Trust
) -> Iterator[tuple[Part, str | None]]:
    """Parts that are not finished, with what is wrong with those that were."""
    claims_success = _is_there(out, out.success)

    def look(part: Part) -> tuple[bool, str | None]:
        """Whether a part is finished, and what is wrong with it."""
        try:
            if out.finished(part, trust) is not None:
                return True, None
        except DataError as error:
            return False, str(error)
        return False, f"{out.part_file(part)} has no record" if claims_success else None

    for part, (is_finished, problem) in zip(parts, out.of_each(look, parts), strict=True):
        if not is_finished:
            yield part, problem


def _store_plan(out: OutputDir, work: ResumePlan) -> None:
    if has_finished_rows(out) and stored_manifest(out).layout == LAYOUT:
        restore_manifest(out, work.manifest)
    else:
        store_manifest(out, work.manifest)
    if work.todo:
        with storage_errors(out.success, "delete"):
            out.files.delete(out.success)
            out.files.sync(out.root)


def clear_staging(out: OutputDir) -> None:
    """Make the folder that ``out.writer`` stages files in, without those a dead run has left.

    Raises:
        StorageError: it cannot be written to.
    """
    with storage_errors(out.staging, "delete"):
        out.files.delete(out.staging)
    with storage_errors(out.staging):
        out.files.make_directory(out.staging)


def _make_directories(out: OutputDir) -> None:
    clear_staging(out)
    rows = (out.data, out.parts, out.segments, out.tokens, out.requests, out.keys, out.locks)
    records = (out.stats, out.steps, out.runs, out.logs, out.in_flight)
    for directory in (out.staging, *rows, *records):
        with storage_errors(directory):
            out.files.make_directory(directory)
            if not out.files.can_write(directory):
                raise PermissionError(13, os.strerror(13))


def _refuse_foreign(out: OutputDir, begun: bool) -> None:
    """Check that nothing here is another program's, or a person's: it must not be deleted.

    Raises:
        LockedError: naming the first file that is.
    """
    found = [path for path in out.files.entries(out.data) if not PART_FILE.fullmatch(path.name)]
    if not begun:  # then nothing here is this program's
        results = (out.success, out.summary, out.report, *out.openai_files)
        ours = (*results, *(out.stats / name for name in STATS_FILES))
        found = [*out.files.entries(out.data), *(path for path in ours if _is_there(out, path))]
    if found:
        origin = "is no output of batchinfer" if begun else f"is there without {out.manifest.name}"
        raise LockedError(
            f"{printable(str(found[0]))} {origin}",
            hint="use --output for another directory, or move what is there away",
        )


def _is_there(out: OutputDir, path: PurePath) -> bool:
    return out.files.stat(path) is not None


def holds_plan(out: OutputDir, manifest: Manifest) -> bool:
    """Whether what is here was begun for a plan, as far as its manifest can be read."""
    try:
        begun = stored_manifest(out)
    except DataError:
        return False
    return begun.fingerprint == manifest.fingerprint and begun.has_same_input(manifest)


def has_finished_rows(out: OutputDir) -> bool:
    """Whether rows of whatever job are in parts or segments."""
    return any(out.files.entries(out.parts)) or any(out.files.entries(out.segments))


def _clear(out: OutputDir) -> None:
    """Delete this program's files: what says they are whole first, the manifest last."""
    delete, entries = out.files.delete, out.files.entries
    if _is_there(out, out.swap):  # first: it says that what is in ``next`` is whole
        delete(out.swap)
        out.files.sync(out.state)
    for path in (out.success, out.summary, out.report, *out.openai_files):
        delete(path)
    if _is_there(out, out.partitioned_record):
        delete(out.partitioned)
    for path in [path for path in entries(out.data) if PART_FILE.fullmatch(path.name)]:
        delete(path)
    for name in STATS_FILES:
        delete(out.stats / name)
    keep = {out.manifest, out.state / LOCK, out.state / HOLDER, out.locks, out.claims, out.shards}
    keep.add(out.live)  # this run writes there all the while
    for path in [path for path in entries(out.state) if path not in keep]:
        delete(path)
    for directory in (out.root, out.data, out.stats, out.openai, out.state):
        if _is_there(out, directory):
            out.files.sync(directory)  # or old parts might come back beside a new manifest
    delete(out.manifest)
