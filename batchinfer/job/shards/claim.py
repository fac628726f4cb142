"""The claim of a run to an output directory: to all of its parts, or to those of a shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import Event
from typing import Protocol

from batchinfer.console.format import printable
from batchinfer.errors import LockedError
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import (
    ResumePlan,
    agree_on_plan,
    clear_output,
    clear_staging,
    has_finished_rows,
    only_unfinished,
    plan_resume,
    prepare_directory,
)
from batchinfer.job.row_ids import Part
from batchinfer.job.shards.fresh_start import FreshStart, stored_start
from batchinfer.job.shards.locks import lives, own_lock, refuse_shards, shards_seen, wait_for
from batchinfer.job.shards.shard import Shard
from batchinfer.job.storage.filesystem import storage_errors
from batchinfer.job.storage.local_lock import LOCK


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
        """The directory as this run writes parts to it."""
        ...

    def begun(self, manifest: Manifest, if_exists: str) -> AbstractContextManager[ResumePlan]:
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

    def clear(self, work: ResumePlan) -> None:
        """Delete what has to go first; called when nothing else keeps this run from running.

        Raises:
            LockedError: others have begun another job meanwhile.
            StorageError: it cannot be deleted.
        """
        ...

    def ending(self, stop: Event) -> AbstractContextManager[Ending]:
        """What is left to do once this run's parts are made; whoever ends the job does so inside.

        Args:
            stop: when set, others that end the job are not waited for any longer.

        Raises:
            StorageError: the directory cannot be read.
        """
        ...

    def command_for(self, part: Part) -> str:
        """What a user runs to have a part made again that was damaged since."""
        ...


class WholeJob:
    """The claim to all parts, of a run that writes alone."""

    def __init__(self, out: OutputDir) -> None:
        self.out = out

    @contextmanager
    def begun(self, manifest: Manifest, if_exists: str) -> Iterator[ResumePlan]:
        with self.out.locked():
            refuse_shards(self.out)
            work = plan_resume(self.out, manifest, if_exists)
            prepare_directory(self.out, work)
            yield work

    def clear(self, work: ResumePlan) -> None:
        clear_output(self.out, work)

    @contextmanager
    def ending(self, stop: Event) -> Iterator[Ending]:
        yield Ending(self.out)

    def command_for(self, part: Part) -> str:
        return "the same command"


class OneShard:
    """The claim to the parts of a shard.

    Args:
        out: the directory as a run writes to it that writes alone.
    """

    def __init__(self, out: OutputDir, shard: Shard) -> None:
        self.shard = shard
        self.out = own_lock(out, shard)
        self._shared = out.under_lock(LOCK, f"shard {shard}")
        self._parts: list[Part] = []

    @contextmanager
    def begun(self, manifest: Manifest, if_exists: str) -> Iterator[ResumePlan]:
        self._parts = manifest.parts()
        with storage_errors(self.out.locks):
            self.out.files.make_directory(self.out.locks)
        with ExitStack() as stack:
            with wait_for(self._shared.lock):
                refuse_shards(self._shared, but_of=self.shard.count)
                stack.enter_context(self.out.lock.held())
                clear_staging(self.out)
                agreed = self._agree(manifest, if_exists)
                prepare_directory(self.out, agreed, self._shared)
            yield self._own_part_of(agreed)

    def clear(self, work: ResumePlan) -> None:
        if not work.starts_over:
            return
        with wait_for(self._shared.lock, for_anyone=True):
            start = stored_start(self._shared, self.shard.count)
            if start is not None and not start.is_clear:
                clear_output(self._shared, work)
                replace(start, is_clear=True).store(self._shared)
            elif start is None or not start.is_of(self._shared, work.manifest):
                raise self._refusal("other shards have begun another job in")
        clear_staging(self.out)  # which has gone with the others'

    @contextmanager
    def ending(self, stop: Event) -> Iterator[Ending]:
        out = self._shared
        with wait_for(out.lock, for_anyone=True, stop=stop) as is_held:
            if not is_held:
                yield Ending(out, is_stopped=True)
                return
            ended = all(out.files.stat(path) is not None for path in (out.success, out.summary))
            yield Ending(out, self._num_left(), ended)

    def command_for(self, part: Part) -> str:
        maker = self.shard.maker(part.index, len(self._parts))
        return "the same command" if maker == self.shard else f"shard {maker}, or all without one,"

    def _agree(self, manifest: Manifest, if_exists: str) -> ResumePlan:
        """The plan of all parts, which a sibling may have begun; called under the lock."""
        start = stored_start(self._shared, self.shard.count)
        if if_exists == "resume":
            return self._resumed(manifest, start)
        siblings = self._siblings_live()
        if start and start.is_of(self._shared, manifest) and (siblings or self._num_left()):
            return self._resumed(manifest, start)
        if siblings:
            if if_exists == "error" or start is None or start.is_clear:
                raise self._refusal(f"others go on without if_exists: {if_exists} in")
            manifest = replace(manifest, planned_at=start.planned_at)
            return ResumePlan(manifest, self._parts, starts_over=True)
        agreed = agree_on_plan(self._shared, manifest, if_exists)
        FreshStart(self.shard.count, manifest.planned_at, if_exists == "error").store(self._shared)
        return agreed

    def _resumed(self, manifest: Manifest, start: FreshStart | None) -> ResumePlan:
        begins_elsewhere = start is not None and not start.is_clear
        if begins_elsewhere and self._siblings_live():
            raise self._refusal("other shards are about to start over in")
        if begins_elsewhere:  # who wrote that has died
            with storage_errors(self._shared.shards, "delete"):
                self._shared.files.delete(self._shared.shards)
        agreed = agree_on_plan(self._shared, manifest, "resume")
        if not agreed.starts_over:
            return agreed
        if self._siblings_live():
            raise self._refusal("other shards have begun another job in")
        clear_output(self._shared, agreed)  # at once: no row of it is finished
        return replace(agreed, starts_over=False)

    def _own_part_of(self, agreed: ResumePlan) -> ResumePlan:
        owned = self.shard.parts(len(self._parts))
        work = replace(agreed, todo=[self._parts[at] for at in owned], owned=owned)
        if work.starts_over or not has_finished_rows(self.out):
            return work
        work = only_unfinished(self.out, work)
        for part in work.todo:
            if part.name in work.damaged:  # or a sibling would end the job with it
                with storage_errors(self.out.parts, "delete"):
                    self.out.files.delete(self.out.record(part))
        return work

    def _siblings_live(self) -> bool:
        others = (shard for shard in shards_seen(self._shared) if shard != self.shard)
        return any(
            shard.count == self.shard.count and lives(self._shared, shard) for shard in others
        )

    def _num_left(self) -> int:
        """Parts without a record."""
        recorded = {path.stem for path in self._shared.files.entries(self._shared.parts)}
        return sum(part.name not in recorded for part in self._parts)

    def _refusal(self, what: str) -> LockedError:
        return LockedError(
            f"shard {self.shard}: {what} {printable(str(self.out.root))}",
            hint="wait until they have ended, or use --output for another directory",
        )
