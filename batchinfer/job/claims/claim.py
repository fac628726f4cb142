"""Gives a run the exclusive right to write to an output directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa

from batchinfer.console.format import printable
from batchinfer.console.terminal import print_line
from batchinfer.job.claims.generation import other_generations, refuse_workers_of_updates
from batchinfer.job.claims.kernels import forget_kernels
from batchinfer.job.claims.part_queue import PartQueue, all_parts
from batchinfer.job.claims.swap_generation import put_in_place
from batchinfer.job.claims.writers import refuse_writers
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.manifest_file import is_begun, stored_manifest
from batchinfer.job.output.resume import (
    ResumePlan,
    clear_output,
    has_rows,
    plan_resume,
    prepare_directory,
    refuse_half_an_update,
    refuse_unexpected_files,
)
from batchinfer.job.row_ranges import Part

Reopen = Callable[[OutputDir, Manifest], None]
"""Function that reopens finished parts with rows to rerun, under the directory's lock."""


@dataclass(frozen=True)
class Ending:
    """What is left to do after a run has written its parts."""

    out: OutputDir
    """The output directory, with the lock that a run holds while it ends the job."""
    num_parts_left: int = 0
    """Parts that other runs still have to write."""
    is_finished: bool = False
    """True if another run has ended the job already."""
    is_stopped: bool = False
    """True if a signal stopped this run while it waited for another run."""

    @property
    def ends_job(self) -> bool:
        return not (self.num_parts_left or self.is_finished or self.is_stopped)


class Claim:
    """A lone run's right to write to an output directory; several writers use ``SharedClaim``.

    Args:
        present: the output that an update replaces with ``out`` once ``out`` is complete; None if
            the run is not an update.
    """

    def __init__(self, out: OutputDir, present: OutputDir | None = None) -> None:
        self.out = out
        self.present = present

    @contextmanager
    def begun(
        self, manifest: Manifest, if_exists: str, reopen: Reopen | None = None
    ) -> Iterator[ResumePlan]:
        """Lock the directory, decide which parts to write, and prepare the directory.

        Args:
            if_exists: ``resume``, ``error`` or ``overwrite``.

        Raises:
            LockedError: another run writes to the directory, or it holds another job's output.
            DataError: the input has changed.
            StorageError: the directory cannot be written to.
        """
        home = self.present or self.out
        with home.locked():
            refuse_writers(home)
            takes_over: tuple[OutputDir, ...] = ()
            if self.present is not None:
                refuse_half_an_update(home)
                refuse_workers_of_updates(home)
                stored = stored_manifest(home)
                refuse_unexpected_files(home, stored)
                # A chat template may print the time of the plan, so a new time would change
                # prompts.
                if not is_begun(self.out):
                    manifest = replace(manifest, planned_at=stored.planned_at)
                if_exists = "resume"
                takes_over = (home, *other_generations(home, self.out))
            plan = plan_resume(self.out, manifest, if_exists)
            prepare_directory(self.out, plan)
            if not has_rows(self.out):
                forget_kernels(self.out)
            yield replace(reopened(self.out, plan, reopen), takes_over=takes_over)

    def queue(self, plan: ResumePlan, generated: pa.Schema) -> PartQueue:
        """Return the parts to write, together with their rows that are already finished."""
        return all_parts(self.out, plan, generated)

    def clear(self, plan: ResumePlan) -> None:
        """Delete the output that the plan replaces.

        Callers load the model first, so that the old output survives if the model cannot be loaded.

        Raises:
            LockedError: other writers have begun another job in the meantime.
            StorageError: the output cannot be deleted.
        """
        clear_output(self.out, plan)

    @contextmanager
    def locked(self) -> Iterator[OutputDir]:
        """Hold the directory's lock; yield the directory to use while the lock is held."""
        yield self.out

    @contextmanager
    def ending(self, is_over: Callable[[], bool]) -> Iterator[Ending]:
        """Hold the directory's lock, and yield what is left to do for the caller.

        Args:
            is_over: returns True to stop waiting for a lock that other runs hold.
        """
        yield Ending(self.out)
        if self.present is not None:
            _replace(self.present, self.out)

    def command_for(self, part: Part) -> str:
        """Return a phrase that tells the user which command rewrites a damaged part."""
        return "the same command"


def _replace(present: OutputDir, generation: OutputDir) -> None:
    """Replace the present output with a generation. Keep a present output that has ``_SUCCESS`` if
    the generation has none."""
    files = present.files
    if files.stat(generation.success) is not None or files.stat(present.success) is None:
        put_in_place(present, generation)
        return
    print_line(
        f"{printable(str(present.root))} keeps its old rows, because the update ended without "
        f"_SUCCESS; the new rows are in {printable(str(generation.root))}",
        to_stderr=True,
    )


def reopened(out: OutputDir, plan: ResumePlan, reopen: Reopen | None) -> ResumePlan:
    if reopen is None:
        return plan
    reopen(out, plan.manifest)
    return plan_resume(out, plan.manifest, "resume")
