"""Decides which parts a run has to write in an output directory, and prepares the directory.

``plan_resume`` changes nothing. ``prepare_directory`` makes the directory ready without deleting
finished output. ``clear_output`` deletes output that the plan replaces, once the model is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
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
from batchinfer.job.row_ranges import Part
from batchinfer.job.storage.filesystem import storage_errors
from batchinfer.job.storage.local_lock import HOLDER, LOCK

STATS_FILES = ("steps.parquet", "requests.parquet")
"""Names of the statistics files of a job that has ended."""
PART_FILE = re.compile(r"part-\d{5,}\.parquet")
"""Pattern of the names of parts."""


@dataclass(frozen=True)
class ResumePlan:
    """The parts that a run has to write in an output directory, and the output it replaces."""

    manifest: Manifest
    """The job's plan; if the run resumes, with the time and fingerprint of the stored plan."""
    parts: Sequence[Part]
    """Parts of this run, finished or not, in order: all parts of the job, or of a shard."""
    todo: Sequence[Part]
    """The unfinished parts of ``parts``."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with each finished part that must be written again, keyed by part name."""
    starts_over: bool = False
    """True if the present output is deleted first."""
    takes_over: Sequence[OutputDir] = ()
    """Outputs that an update replaces; rows that have not changed are copied from them."""

    @property
    def begins(self) -> bool:
        """True if none of the run's parts is finished."""
        return len(self.todo) == len(self.parts)


def plan_resume(
    out: OutputDir, manifest: Manifest, if_exists: str, trust: Trust = "marks"
) -> ResumePlan:
    """Return the plan of the parts that are left to write, and change nothing.

    Args:
        out: the output directory; it may be missing.
        if_exists: ``resume``, ``error`` or ``overwrite``.

    Raises:
        LockedError: the directory holds finished rows of another job, or files of unknown origin.
        DataError: the input has changed since the first part was finished.
    """
    agreed = agree_on_plan(out, manifest, if_exists)
    if agreed.starts_over or not has_finished_rows(out):
        return agreed
    return only_unfinished(out, agreed, trust)


def agree_on_plan(out: OutputDir, manifest: Manifest, if_exists: str) -> ResumePlan:
    """Return a plan like ``plan_resume``, but without checking parts, so ``todo`` lists all parts.

    Raises:
        LockedError, DataError: see ``plan_resume``.
    """
    begun = is_begun(out)
    if if_exists != "overwrite":
        refuse_half_an_update(out)
    if begun and if_exists == "error":
        raise LockedError(
            f"{printable(str(out.root))} already holds output, and output.if_exists is error",
            hint="use --output for another directory, or set if_exists to resume or overwrite",
        )
    overwrites = if_exists == "overwrite"
    if not begun or overwrites:
        _refuse_foreign(out, begun)
    if overwrites or not has_finished_rows(out):
        starts_over = overwrites or (begun and not holds_plan(out, manifest))
        if not starts_over:
            refuse_unexpected_files(out, manifest)
            if begun:  # other processes may already use the stored time
                stored = stored_manifest(out)
                images = manifest.image_files or stored.image_files
                manifest = replace(manifest, planned_at=stored.planned_at, image_files=images)
        return ResumePlan(manifest, manifest.parts(), manifest.parts(), starts_over=starts_over)
    stored = stored_manifest(out)
    stored.check_same_job(manifest, str(out.root))
    refuse_unexpected_files(out, stored)
    plan = replace(
        manifest,
        planned_at=stored.planned_at,
        fingerprint=stored.fingerprint,
        job=stored.job,
        image_files=stored.image_files,
    )
    return ResumePlan(plan, plan.parts(), plan.parts())


def only_unfinished(out: OutputDir, plan: ResumePlan, trust: Trust = "marks") -> ResumePlan:
    """Return ``plan`` with only the unfinished parts in ``todo``. Raise LockedError if another
    version began the output, and this version cannot resume its rows."""
    unfinished = _unfinished(out, plan.todo, trust)
    damaged = {part.name: problem for part, problem in unfinished.items() if problem}
    if len(damaged) < len(unfinished) and stored_manifest(out).layout != LAYOUT:
        raise LockedError(
            f"{printable(str(out.root))} holds an unfinished job from another version of "
            "batchinfer",
            hint="finish it with that version; or use --output (run-batch: -o) to write elsewhere; "
            "or use --overwrite to start over. run --reuse copies its rows to another output",
        )
    return replace(plan, todo=list(unfinished), damaged=damaged)


def prepare_directory(out: OutputDir, plan: ResumePlan, shared: OutputDir | None = None) -> None:
    """Make the folders and store the plan. The caller holds the directory's lock.

    Args:
        shared: the directory with the lock that all writers share, for files that all writers read;
            None for ``out``.

    Raises:
        LockedError: another run has taken over the lock.
        StorageError: the directory cannot be written to.
    """
    _make_directories(out)
    if not plan.starts_over:
        _store_plan(shared or out, plan)


def clear_output(out: OutputDir, plan: ResumePlan) -> None:
    """Delete batchinfer's files if the plan starts over. The caller holds the directory's lock."""
    if plan.starts_over:
        with storage_errors(out.root, "delete"):
            _clear(out)
        _make_directories(out)
        _store_plan(out, plan)


def refuse_half_an_update(out: OutputDir) -> None:
    """Raise LockedError if a swap of generations was interrupted in ``out``."""
    if _exists(out, out.swap):
        raise LockedError(
            f"{printable(str(out.root))} is being updated and holds both old and new files",
            hint="if no run is writing to it, run the job again without --shard to finish the "
            "update",
        )


def plan_of(out: OutputDir) -> Manifest:
    """Return the plan of the job that writes, or wrote, to ``out``. Raise DataError if there is no
    plan, or if the plan and its copy are damaged."""
    if not is_begun(out):
        raise DataError(
            f"{printable(str(out.root))} holds no batchinfer output"
            f"{'' if out.files.stat(out.root) else near_path(out.root)}",
            hint="give the folder that output.path in the job file names",
        )
    return stored_manifest(out)


def unrecorded(out: OutputDir, parts: Sequence[Part]) -> list[Part]:
    recorded = {path.stem for path in out.files.entries(out.parts)}
    return [part for part in parts if part.name not in recorded]


def unexpected_files(out: OutputDir, manifest: Manifest) -> list[PurePath]:
    planned = {out.part_file(part) for part in manifest.parts()}
    return [path for path in out.files.entries(out.data) if path not in planned]


def refuse_unexpected_files(out: OutputDir, manifest: Manifest) -> None:
    """Raise LockedError if ``data/`` holds a foreign Parquet file, which readers would take for
    output."""
    for path in unexpected_files(out, manifest):
        if path.suffix == ".parquet":
            raise LockedError(
                f"{printable(str(path))} is not a part of this job, but readers would read it as "
                "one",
                hint="move it away, then run again",
            )


def _unfinished(out: OutputDir, parts: Sequence[Part], trust: Trust) -> dict[Part, str | None]:
    """Map each unfinished part to its problem, or to None if it was never finished."""
    claims_success = _exists(out, out.success)

    def check(part: Part) -> tuple[bool, str | None]:
        try:
            if out.finished(part, trust) is not None:
                return True, None
        except DataError as error:
            return False, str(error)
        return False, f"{out.part_file(part)} has no record" if claims_success else None

    checked = zip(parts, out.of_each(check, parts), strict=True)
    return {part: problem for part, (is_finished, problem) in checked if not is_finished}


def _store_plan(out: OutputDir, plan: ResumePlan) -> None:
    if has_finished_rows(out) and stored_manifest(out).layout == LAYOUT:
        restore_manifest(out, plan.manifest)
    else:
        store_manifest(out, plan.manifest)
    if plan.todo:
        out.reopen()


def clear_staging(out: OutputDir) -> None:
    """Make an empty staging folder for ``out.writer``."""
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
    """Check that the output holds no files of the user or of another program.

    A file in ``data/`` is foreign if it is not named like a part. If no job has begun here, every
    file in ``data/`` and every file with the name of a result file is foreign.
    """
    foreign = [path for path in out.files.entries(out.data) if not PART_FILE.fullmatch(path.name)]
    if not begun:  # this program has not written any file here
        results = (out.success, out.summary, out.report, *out.openai_files)
        ours = (*results, *(out.stats / name for name in STATS_FILES))
        foreign = [*out.files.entries(out.data), *(path for path in ours if _exists(out, path))]
    if foreign:
        origin = (
            "was not written by batchinfer"
            if begun
            else f"is not from batchinfer: there is no {out.manifest.name}"
        )
        raise LockedError(
            f"{printable(str(foreign[0]))} {origin}",
            hint="use --output for another directory, or move the file away",
        )


def _exists(out: OutputDir, path: PurePath) -> bool:
    return out.files.stat(path) is not None


def holds_plan(out: OutputDir, manifest: Manifest) -> bool:
    """Return True if the output was begun for this plan; False if the stored plan is damaged."""
    try:
        begun = stored_manifest(out)
    except DataError:
        return False
    return begun.fingerprint == manifest.fingerprint and begun.has_same_input(manifest)


def has_finished_rows(out: OutputDir) -> bool:
    """Return True if parts or segments hold rows of any job."""
    return any(out.files.entries(out.parts)) or any(out.files.entries(out.segments))


def has_rows(out: OutputDir) -> bool:
    """Return True if the output holds finished rows, or tokens of unfinished rows."""
    return has_finished_rows(out) or any(out.files.entries(out.tokens))


def _clear(out: OutputDir) -> None:
    """Delete batchinfer's files: first files that mark the output as complete, last the plan."""
    delete, entries = out.files.delete, out.files.entries
    if _exists(out, out.swap):  # first: a run that finds this file moves ``next`` into place
        delete(out.swap)
        out.files.sync(out.state)
    out.reopen()
    for path in (out.summary, out.report, *out.openai_files):
        delete(path)
    if _exists(out, out.partitioned_record):
        delete(out.partitioned)
    for path in [path for path in entries(out.data) if PART_FILE.fullmatch(path.name)]:
        delete(path)
    for name in STATS_FILES:
        delete(out.stats / name)
    keep = {out.manifest, out.state / LOCK, out.state / HOLDER, out.locks, out.claims, out.shards}
    keep.add(out.live)  # this run still writes its progress there
    for path in [path for path in entries(out.state) if path not in keep]:
        delete(path)
    for directory in (out.root, out.data, out.stats, out.openai, out.state):
        if _exists(out, directory):
            # Without this sync, a crash might restore old parts next to a new manifest.
            out.files.sync(directory)
    delete(out.manifest)
