"""The claim of a run that makes the next generation of an output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa

from batchinfer.console.format import printable
from batchinfer.console.terminal import print_line
from batchinfer.errors import DataError
from batchinfer.job.claims.claim import Ending, Reopen, reopened
from batchinfer.job.claims.queue import PartQueue, all_parts
from batchinfer.job.claims.swap import finish_swap, is_swapping, put_in_place
from batchinfer.job.claims.writers import refuse_writers
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.manifest_file import is_begun, stored_manifest
from batchinfer.job.output.resume import (
    ResumePlan,
    clear_output,
    has_finished_rows,
    plan_resume,
    prepare_directory,
    refuse_half_an_update,
    refuse_unexpected_files,
)
from batchinfer.job.row_ids import Part
from batchinfer.job.storage.filesystem import storage_errors


def end_swap(out: OutputDir) -> None:
    """Go on with a swap of generations that was cut off, if one was.

    Raises:
        JobError: it cannot be gone on with, or another run is at it.
    """
    if is_swapping(out):
        with out.locked():
            finish_swap(out)


def next_generation(
    out: OutputDir, manifest: Manifest, *, update: bool, retry_errors: bool
) -> OutputDir | None:
    """The directory of the generation that a job makes, where ``out`` holds rows of another.

    One that was begun is gone on with; else one has to be asked for.

    Args:
        retry_errors: begins one unless it has fewer rows: who mends rows loses none.

    Raises:
        DataError: the plan there is damaged.
    """
    has_plan = any(out.files.stat(path) for path in (out.manifest, out.manifest_copy))
    if not has_plan or not has_finished_rows(out):
        return None
    stored, generation = stored_manifest(out), out.generation(manifest.name)
    if stored.is_of_same_job(manifest):
        return None
    mends = retry_errors and manifest.num_rows >= stored.num_rows
    return generation if update or mends or is_begun(generation) else None


def _has_plan(out: OutputDir) -> bool:
    try:
        stored_manifest(out)
    except DataError:
        return False
    return True


def drop_generations(out: OutputDir) -> None:
    """Delete generations that were begun for jobs that are not asked for any more."""
    if out.files.entries(out.next):
        with out.locked(), storage_errors(out.next, "delete"):
            out.files.delete(out.next)


class NextGeneration:
    """The claim to all parts of a generation, which takes the place of what is in ``present``.

    It does so when it is made and has ``_SUCCESS``, or when what is there has none either. What
    chat templates are told the time is stays: else rows would differ that have not changed.
    """

    def __init__(self, present: OutputDir, generation: OutputDir) -> None:
        self.out = generation
        self._present = present

    @contextmanager
    def begun(
        self, manifest: Manifest, if_exists: str, reopen: Reopen | None = None
    ) -> Iterator[ResumePlan]:
        present = self._present
        with present.locked():
            refuse_writers(present)
            refuse_half_an_update(present)
            stored = stored_manifest(present)
            refuse_unexpected_files(present, stored)
            if not is_begun(self.out):
                manifest = replace(manifest, planned_at=stored.planned_at)
            work = plan_resume(self.out, manifest, "resume")
            prepare_directory(self.out, work)
            work = replace(work, takes_over=(present, *self._others()))
            yield reopened(self.out, work, reopen)

    def _others(self) -> list[OutputDir]:
        """Generations that were begun for other plans; those that hold nothing are deleted."""
        present, found = self._present, []
        for path in present.files.entries(present.next):
            generation = present.generation(path.name)
            if path.name == self.out.root.name:
                continue
            if not (has_finished_rows(generation) or present.files.entries(generation.tokens)):
                with storage_errors(path, "delete"):
                    present.files.delete(path)
            elif _has_plan(generation):
                found.append(generation)
        return found

    def clear(self, work: ResumePlan) -> None:
        clear_output(self.out, work)

    def queue(self, work: ResumePlan, generated: pa.Schema) -> PartQueue:
        return all_parts(self.out, work, generated)

    @contextmanager
    def ending(self, is_over: Callable[[], bool]) -> Iterator[Ending]:
        yield Ending(self.out)
        present, files = self._present, self.out.files
        if files.stat(self.out.success) is not None or files.stat(present.success) is None:
            put_in_place(present, self.out)
            return
        print_line(
            f"{printable(str(present.root))} stays as it is, for it has _SUCCESS; the new rows are "
            f"in {printable(str(self.out.root))}",
            to_stderr=True,
        )

    def command_for(self, part: Part) -> str:
        return "the same command"
