"""Lets several processes write to one output directory.

A process is a shard, a worker or a launcher. A shard writes a fixed share of the parts. A worker
claims parts of the job or of a shard as it goes. A launcher starts workers and ends the job for
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import pyarrow as pa
from pydantic import TypeAdapter

from batchinfer.console.format import printable
from batchinfer.errors import JobError, LockedError
from batchinfer.job.claims.claim import Claim, Ending, Reopen, reopened
from batchinfer.job.claims.crashed_rows import CrashHistory
from batchinfer.job.claims.kernels import forget_kernels
from batchinfer.job.claims.part_queue import PartQueue, parts_of_writer
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.worker_queue import ClaimedParts, crash_history
from batchinfer.job.claims.writers import (
    Claims,
    Writer,
    lives,
    living_writers,
    own_lock,
    refuse_writers,
    wait_for,
    writers_seen,
)
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.commit import Draft, publish
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.manifest_file import stored_manifest
from batchinfer.job.output.resume import (
    ResumePlan,
    agree_on_plan,
    clear_output,
    clear_staging,
    has_finished_rows,
    has_rows,
    holds_plan,
    only_unfinished,
    prepare_directory,
    unrecorded,
)
from batchinfer.job.row_ranges import Part
from batchinfer.job.run_ids import run_number
from batchinfer.job.storage.filesystem import STRICT, read_file, storage_errors
from batchinfer.job.storage.local_lock import LOCK, HeldError


@dataclass(frozen=True)
class Role:
    shard: Shard | None = None
    """The shard whose parts the process writes; None for the whole job."""
    is_worker: bool = False
    """True if the process claims parts as it goes."""
    is_launcher: bool = False
    """True if the process starts workers and writes no part itself."""
    has_launcher: bool = False
    """True if a launcher started the process; the launcher then ends the job."""
    num_workers: int = 1
    """Minimum number of workers to expect; more may be alive."""

    @property
    def is_static(self) -> bool:
        """True if the process writes all parts of its shard and claims no part."""
        return not (self.is_worker or self.is_launcher)

    def parts(self, parts: list[Part]) -> list[Part]:
        if self.shard is None:
            return parts
        return [parts[index] for index in self.shard.parts(len(parts))]


@dataclass(frozen=True)
class FreshStart:
    """The content of ``_batchinfer/shards.json``: the team of writers that is starting the output
    over.

    With ``output.if_exists: overwrite`` the first writer deletes the output, and the later writers
    must keep the rows of their team. With ``if_exists: error`` the first writer must find no
    output, but later writers find the team's rows. The first writer therefore stores its team and
    the time of its plan, which is also in the manifest. Until the job ends, all writers of a stored
    team resume, even if they are started again.
    """

    __pydantic_config__: ClassVar = STRICT

    team: str
    """``Writer.team`` of the writers that start over."""
    planned_at: str
    """``Manifest.planned_at`` of the team's plan."""
    is_clear: bool
    """True once the old output is deleted, which happens after a writer has loaded its model."""

    def store(self, out: OutputDir) -> None:
        """Write this object to ``shards.json``. The caller holds the directory's lock."""
        out.write(out.shards, json.dumps(asdict(self)).encode())

    def has_begun(self, out: OutputDir, manifest: Manifest) -> bool:
        """Return True if this team began the output in ``out`` for the job of ``manifest``."""
        if not (self.is_clear and holds_plan(out, manifest)):
            return False
        return stored_manifest(out).planned_at == self.planned_at


_STORED = TypeAdapter(FreshStart)


def _stored_start(out: OutputDir, team: str) -> FreshStart | None:
    try:
        start = _STORED.validate_json(read_file(out.files, out.shards))
    except (OSError, ValueError):
        return None
    return start if start.team == team else None


class SharedClaim(Claim):
    """The right to write to an output directory, for one of several writers.

    Args:
        out: the output directory, with the lock that a run takes if it writes alone.
        window_rows: maximum number of rows that a worker claims at a time.
    """

    def __init__(self, out: OutputDir, role: Role, window_rows: int) -> None:
        self.role = role
        self.writer = Writer(role.shard)
        self.shared = out.under_lock(LOCK, "a worker" if role.is_worker else str(self.writer))
        """The output directory with the lock that the writers share."""
        super().__init__(own_lock(out, self.writer))
        self.claims = Claims(self.shared, self.writer)
        self._window_rows = window_rows
        self._parts: list[Part] = []

    @contextmanager
    def begun(
        self, manifest: Manifest, if_exists: str, reopen: Reopen | None = None
    ) -> Iterator[ResumePlan]:
        self._parts = manifest.parts()
        with storage_errors(self.shared.locks):
            self.shared.files.make_directory(self.shared.locks)
        with ExitStack() as stack:
            with wait_for(self.shared.lock):
                refuse_writers(self.shared, but_of=self.writer.team)
                self._hold_own_lock(stack)
                clear_staging(self.out)
                is_first = not self._siblings_live()
                if reopen is not None and not is_first:
                    raise self._refusal("failed rows cannot run again while other workers write to")
                agreed = self._agree(manifest, if_exists, siblings=not is_first)
                prepare_directory(self.out, agreed, self.shared)
                if is_first and not has_rows(self.shared):
                    forget_kernels(self.shared)
                self._parts = agreed.manifest.parts()
                claimed = []
                if self.role.shard is not None and self.role.is_static:
                    claimed.append(self.role.shard.parts(len(self._parts)))
                self.claims.begin(run_number(self.out.next_run_id), claimed)
                stack.callback(self._drop_claims)
                agreed = reopened(self.shared, agreed, reopen)
            trusts_records = self.role.is_worker and not is_first
            yield self._own_part_of(agreed, trusts_records=trusts_records)

    def queue(self, plan: ResumePlan, generated: pa.Schema) -> PartQueue:
        is_static, history = self.role.is_static, CrashHistory()
        if is_static and not plan.starts_over:
            with self.locked():
                living = living_writers(self.shared, self.writer)
                history = crash_history(self.shared, self.out, plan, generated, living)
        parts = parts_of_writer(self.out, plan, plan.todo, generated, history, is_owner=is_static)
        if not self.role.is_worker:
            return PartQueue(parts, self.publish, self.claims.check)
        return ClaimedParts(
            parts,
            self.publish,
            self.claims.check,
            out=self.out,
            shared=self.shared,
            claims=self.claims,
            plan=plan,
            generated=generated,
            num_workers=self.role.num_workers,
            window_rows=self._window_rows,
        )

    def clear(self, plan: ResumePlan) -> None:
        if not plan.starts_over:
            return
        with self.locked():
            start = _stored_start(self.shared, self.writer.team)
            if start is not None and not start.is_clear:
                clear_output(self.shared, plan)
                replace(start, is_clear=True).store(self.shared)
            elif start is None or not start.has_begun(self.shared, plan.manifest):
                raise self._refusal("other writers have started another job in")
        clear_staging(self.out)  # the staging folder was deleted with the output

    @contextmanager
    def locked(self) -> Iterator[OutputDir]:
        with wait_for(self.shared.lock, for_anyone=True):
            yield self.shared

    def publish(self, part: Part, draft: Draft) -> None:
        """Move a staged part to its final place.

        Raises:
            LockedError: another process has taken over this process's parts.
            StorageError: a file cannot be written.
        """
        if self.out.lock.fences:
            publish(self.out, part, draft)
            return
        with wait_for(self.shared.lock):
            self.claims.check()
            publish(self.out, part, draft)

    @contextmanager
    def ending(self, is_over: Callable[[], bool]) -> Iterator[Ending]:
        out = self.shared
        with wait_for(out.lock, for_anyone=True, is_over=is_over) as is_held:
            if not is_held:
                yield Ending(out, is_stopped=True)
                return
            ended = all(out.files.stat(path) is not None for path in (out.success, out.summary))
            yield Ending(out, len(unrecorded(out, self._parts)), ended)

    def command_for(self, part: Part) -> str:
        shard = self.role.shard
        if shard is None:
            return "the same command"
        maker = shard.maker(part.index, len(self._parts))
        return (
            "the same command"
            if maker == shard
            else f"the job with --shard {maker} or without --shard"
        )

    def _hold_own_lock(self, stack: ExitStack) -> None:
        """Hold this writer's lock. A worker takes the lowest worker number whose lock is free."""
        if not self.role.is_worker:
            stack.enter_context(self.out.lock.held())
            return
        number, is_held = 0, False
        while not is_held:
            number += 1
            self.writer = Writer(self.role.shard, number)
            self.out = own_lock(self.shared, self.writer)
            with suppress(HeldError):
                stack.enter_context(self.out.lock.held())
                is_held = True
        self.claims = Claims(self.shared, self.writer)

    def _drop_claims(self) -> None:
        with suppress(JobError), wait_for(self.shared.lock):
            self.claims.check()
            self.claims.drop()

    def _agree(self, manifest: Manifest, if_exists: str, *, siblings: bool) -> ResumePlan:
        """Return the plan of all parts, which another writer of the team may have stored already.

        The caller holds the directory's lock.
        """
        start = _stored_start(self.shared, self.writer.team)
        if if_exists == "resume":
            return self._resumed(manifest, start, siblings)
        has_parts_left = bool(unrecorded(self.shared, self._parts))
        if start and start.has_begun(self.shared, manifest) and (siblings or has_parts_left):
            return self._resumed(manifest, start, siblings)
        if siblings:
            if if_exists == "error" or start is None or start.is_clear:
                raise self._refusal(
                    f"this process has if_exists: {if_exists}, but other writers were started "
                    "without it and are writing to"
                )
            manifest = replace(manifest, planned_at=start.planned_at)
            return ResumePlan(manifest, self._parts, self._parts, starts_over=True)
        agreed = agree_on_plan(self.shared, manifest, if_exists)
        FreshStart(self.writer.team, manifest.planned_at, if_exists == "error").store(self.shared)
        return agreed

    def _resumed(self, manifest: Manifest, start: FreshStart | None, siblings: bool) -> ResumePlan:
        if start is not None and not start.is_clear:
            if siblings:
                raise self._refusal("other writers are about to start over in")
            # The writer that was about to replace the old output has died.
            with storage_errors(self.shared.shards, "delete"):
                self.shared.files.delete(self.shared.shards)
        agreed = agree_on_plan(self.shared, manifest, "resume")
        if not agreed.starts_over:
            return agreed
        if siblings:
            raise self._refusal("other writers have started another job in")
        # The output may be cleared before a model is loaded, because it has no finished rows.
        clear_output(self.shared, agreed)
        return replace(agreed, starts_over=False)

    def _own_part_of(self, agreed: ResumePlan, *, trusts_records: bool) -> ResumePlan:
        parts = self.role.parts(self._parts)
        plan = replace(agreed, parts=parts, todo=parts)
        if plan.starts_over or not has_finished_rows(self.out):
            return plan
        if trusts_records:
            return replace(plan, todo=unrecorded(self.shared, parts))
        plan = only_unfinished(self.out, plan)
        for part in plan.todo:
            # Delete the record now, or another worker may end the job with the damaged part.
            if part.name in plan.damaged:
                with storage_errors(self.out.parts, "delete"):
                    self.out.files.delete(self.out.record(part))
        return plan

    def _siblings_live(self) -> bool:
        return any(
            writer.team == self.writer.team and lives(self.shared, writer)
            for writer in writers_seen(self.shared)
            if writer != self.writer
        )

    def _refusal(self, what: str) -> LockedError:
        return LockedError(
            f"{self.writer}: {what} {printable(str(self.out.root))}",
            hint="wait until they have finished, or use --output for another directory",
        )
