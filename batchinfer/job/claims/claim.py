"""The claim of a run to an output directory, and that of a run which writes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa

from batchinfer.job.claims.queue import PartQueue, all_parts
from batchinfer.job.claims.writers import refuse_writers
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import (
    ResumePlan,
    clear_output,
    plan_resume,
    prepare_directory,
)
from batchinfer.job.row_ids import Part

Reopen = Callable[[OutputDir, Manifest], None]
"""Opens finished parts of a plan again whose rows are to run again; called under the lock."""


@dataclass(frozen=True)
class Ending:
    """The end of a run whose parts are made."""

    out: OutputDir
    """Where the job is to be ended."""
    others_left: int = 0
    """Parts that others have to make yet."""
    is_finished: bool = False
    """Whether another run has ended the job already."""
    is_stopped: bool = False
    """Whether this run was asked to stop while another was at it."""

    @property
    def is_ours(self) -> bool:
        """Whether this run has to end the job."""
        return not (self.others_left or self.is_finished or self.is_stopped)


class Claim(Protocol):
    """What a run may write to an output directory, and when."""

    @property
    def out(self) -> OutputDir:
        """The directory as this run writes to it; known once the claim is begun."""
        ...

    def begun(
        self, manifest: Manifest, if_exists: str, reopen: Reopen | None = None
    ) -> AbstractContextManager[ResumePlan]:
        """Hold the claim: look at what is there and make the directory ready.

        Args:
            manifest: what this run plans.
            if_exists: ``resume``, ``error`` or ``overwrite``.

        Raises:
            LockedError: another run has the claim, or the directory holds another job's output.
            DataError: the input has changed.
            StorageError: the directory cannot be written to.
        """
        ...

    def queue(self, work: ResumePlan, generated: pa.Schema) -> PartQueue:
        """The parts to make, and what earlier runs have left of them.

        Args:
            generated: the output's generated columns.

        Raises:
            StorageError: the directory cannot be read or written.
        """
        ...

    def clear(self, work: ResumePlan) -> None:
        """Delete what has to go first; called when nothing else keeps this run from running.

        Raises:
            LockedError: others have begun another job meanwhile.
            StorageError: it cannot be deleted.
        """
        ...

    def ending(self, is_over: Callable[[], bool]) -> AbstractContextManager[Ending]:
        """What is left to do once this run's parts are made. The last run ends the job inside it.

        Args:
            is_over: whether others that end the job are not waited for any longer.

        Raises:
            StorageError: the directory cannot be read.
        """
        ...

    def command_for(self, part: Part) -> str:
        """What a user runs to have a part made again that was damaged since."""
        ...


def reopened(out: OutputDir, work: ResumePlan, reopen: Reopen | None) -> ResumePlan:
    """The work with that of parts that ``reopen`` has opened again."""
    if reopen is None:
        return work
    reopen(out, work.manifest)
    return replace(plan_resume(out, work.manifest, "resume"), takes_over=work.takes_over)


class WholeJob:
    """The claim to all parts, of a run that writes alone."""

    def __init__(self, out: OutputDir) -> None:
        self.out = out

    @contextmanager
    def begun(
        self, manifest: Manifest, if_exists: str, reopen: Reopen | None = None
    ) -> Iterator[ResumePlan]:
        with self.out.locked():
            refuse_writers(self.out)
            work = plan_resume(self.out, manifest, if_exists)
            prepare_directory(self.out, work)
            yield reopened(self.out, work, reopen)

    def queue(self, work: ResumePlan, generated: pa.Schema) -> PartQueue:
        return all_parts(self.out, work, generated)

    def clear(self, work: ResumePlan) -> None:
        clear_output(self.out, work)

    @contextmanager
    def ending(self, is_over: Callable[[], bool]) -> Iterator[Ending]:
        yield Ending(self.out)

    def command_for(self, part: Part) -> str:
        return "the same command"
