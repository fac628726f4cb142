"""The claim of one of several processes that write to an output at once.

Such a process is a shard, which makes the parts of its share; a worker, which claims parts as it
goes, of the whole job or of a shard; or a launcher, which starts workers and ends the job for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

import pyarrow as pa

from batchinfer.console.format import printable
from batchinfer.errors import JobError, LockedError
from batchinfer.job.claims.claim import Ending, Reopen, reopened
from batchinfer.job.claims.crashes import CrashHistory, count_deaths
from batchinfer.job.claims.fresh_start import FreshStart, stored_start
from batchinfer.job.claims.queue import (
    KnownParts,
    PartQueue,
    PartsToMake,
    parts_of,
    unfinished_rows,
)
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.writers import (
    Claims,
    Writer,
    dead_logs,
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
from batchinfer.job.output.resume import (
    ResumePlan,
    agree_on_plan,
    clear_output,
    clear_staging,
    has_finished_rows,
    only_unfinished,
    prepare_directory,
)
from batchinfer.job.row_ids import Part, RowIds
from batchinfer.job.run_ids import run_number
from batchinfer.job.storage.filesystem import storage_errors
from batchinfer.job.storage.local_lock import LOCK, HeldError

_CLAIMS_LEFT = 6
"""Claims that are left for each worker whenever one is taken, until single parts are left."""
_SLOWER = 1.15
"""How much longer a worker may take for a part than the others for all that is left."""
_POLL_S = 0.5
"""Between looks for parts that have become free; more in a store."""


@dataclass(frozen=True)
class Role:
    """What a process does of a job that several processes share."""

    shard: Shard | None = None
    """Whose parts are made; None: those of the whole job."""
    is_worker: bool = False
    """Whether it claims parts as it goes."""
    is_launcher: bool = False
    """Whether it starts workers and makes no part itself."""
    has_launcher: bool = False
    """Whether a launcher started it, which ends the job."""
    num_workers: int = 1
    """Workers there are to be at least; others that live count too."""


class SharedClaim:
    """The claim of one of several writers.

    Args:
        out: the directory as a run writes to it that writes alone.
        window_rows: rows that a worker claims at most at a time.
    """

    def __init__(self, out: OutputDir, role: Role, window_rows: int) -> None:
        self.role = role
        self.writer = Writer(role.shard)
        self.shared = out.under_lock(LOCK, "a worker" if role.is_worker else str(self.writer))
        self.out = own_lock(out, self.writer)
        self.claims = Claims(self.shared, self.writer)
        self._window_rows = window_rows
        self._parts: list[Part] = []

    @property
    def parts(self) -> list[Part]:
        """The parts that it makes, or some of them."""
        if self.role.shard is None:
            return self._parts
        return [self._parts[at] for at in self.role.shard.parts(len(self._parts))]

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
                agreed = self._agree(manifest, if_exists)
                prepare_directory(self.out, agreed, self.shared)
                self._parts = agreed.manifest.parts()
                owned = self.role.shard.parts(len(self._parts)) if self.role.shard else None
                is_static = not (self.role.is_worker or self.role.is_launcher)
                first_run = run_number(self.out.next_run_id)
                self.claims.begin(first_run, [owned] if owned and is_static else [])
                stack.callback(self._drop_claims)
                if reopen is not None and is_first:
                    agreed = reopened(self.shared, agreed, reopen)
            trusts = self.role.is_worker and not is_first
            yield self._own_part_of(agreed, owned, trusts_records=trusts)

    def queue(self, work: ResumePlan, generated: pa.Schema) -> PartQueue:
        is_static, history = not (self.role.is_worker or self.role.is_launcher), CrashHistory()
        if is_static and not work.starts_over:
            with wait_for(self.shared.lock, for_anyone=True):
                history = self.count_deaths(work, generated, self.living())
        parts = parts_of(self.out, work, work.todo, generated, history, is_owner=is_static)
        if self.role.is_worker:
            return ClaimedParts(self, work, generated, parts)
        return KnownParts(parts, self.publish, self.claims.check)

    def living(self) -> list[Writer]:
        """The writers that run now; called under the lock."""
        return living_writers(self.shared, self.writer)

    def count_deaths(
        self, work: ResumePlan, generated: pa.Schema, living: Sequence[Writer]
    ) -> CrashHistory:
        """What is known of deaths, those since the last look included; called under the lock."""

        def unfinished(rows: RowIds) -> RowIds:
            return unfinished_rows(self.out, work, generated, rows)

        return count_deaths(self.shared, dead_logs(self.shared, living), unfinished)

    def clear(self, work: ResumePlan) -> None:
        if not work.starts_over:
            return
        with wait_for(self.shared.lock, for_anyone=True):
            start = stored_start(self.shared, self.writer.team)
            if start is not None and not start.is_clear:
                clear_output(self.shared, work)
                replace(start, is_clear=True).store(self.shared)
            elif start is None or not start.is_of(self.shared, work.manifest):
                raise self._refusal("others have begun another job in")
        clear_staging(self.out)  # which has gone with the others'

    def publish(self, part: Part, draft: Draft) -> None:
        """Put a staged part in its place.

        Raises:
            LockedError: others have taken over.
            StorageError: the file system refuses.
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
            yield Ending(out, len(self.unrecorded(self._parts)), ended)

    def command_for(self, part: Part) -> str:
        shard = self.role.shard
        if shard is None:
            return "the same command"
        maker = shard.maker(part.index, len(self._parts))
        return "the same command" if maker == shard else f"shard {maker}, or all without one,"

    def deal(self, living: Sequence[Writer], rows_per_s: float) -> tuple[list[Part], bool]:
        """Claim parts that nobody makes, called under the lock; and whether others make some.

        Args:
            rows_per_s: speed of this worker so far; 0: not known.

        Guided self-scheduling: a share of what is left, so that claims become smaller towards the
        end (Polychronopoulos and Kuck, 1987).
        """
        claimed = {writer: Claims(self.shared, writer).claimed for writer in living}
        others = set().union(*(parts for who, parts in claimed.items() if who != self.writer))
        left = self.unrecorded(self.parts)
        free = [part for part in left if part.index not in others | claimed[self.writer]]
        num_workers = max(
            self.role.num_workers, sum(writer.number is not None for writer in living)
        )
        taken = free[: claim_size(free, num_workers, self._window_rows)]
        speeds = [Claims(self.shared, one).rows_per_s for one in living if one != self.writer]
        held = [part for part in left if part.index in others]
        num_left = _num_rows(free) + _num_rows(held) // 2  # those are half made, on average
        if taken and is_too_slow(taken[0].num_rows, num_left, rows_per_s, speeds):
            return [], True
        if taken:
            self.claims.add([range(at.index, at.index + 1) for at in taken], rows_per_s)
        return taken, any(part.index in others for part in left)

    def unrecorded(self, parts: Sequence[Part]) -> list[Part]:
        """Parts without a record."""
        recorded = {path.stem for path in self.shared.files.entries(self.shared.parts)}
        return [part for part in parts if part.name not in recorded]

    def _hold_own_lock(self, stack: ExitStack) -> None:
        """Hold the lock of this writer: for a worker, of the first name that is free."""
        if not self.role.is_worker:
            stack.enter_context(self.out.lock.held())
            return
        number, is_held = 0, False
        while not is_held:
            number += 1
            self.writer = Writer(self.role.shard, number)
            self.out = own_lock(self.shared, self.writer)
            try:
                stack.enter_context(self.out.lock.held())
                is_held = True
            except HeldError:
                continue
        self.claims = Claims(self.shared, self.writer)

    def _drop_claims(self) -> None:
        """Free what this process has claimed, unless that is another's by now."""
        with suppress(JobError), wait_for(self.shared.lock):
            self.claims.check()
            self.claims.drop()

    def _agree(self, manifest: Manifest, if_exists: str) -> ResumePlan:
        """The plan of all parts, which a sibling may have begun; called under the lock."""
        start = stored_start(self.shared, self.writer.team)
        if if_exists == "resume":
            return self._resumed(manifest, start)
        siblings = self._siblings_live()
        is_left = bool(self.unrecorded(self._parts))
        if start and start.is_of(self.shared, manifest) and (siblings or is_left):
            return self._resumed(manifest, start)
        if siblings:
            if if_exists == "error" or start is None or start.is_clear:
                raise self._refusal(f"others go on without if_exists: {if_exists} in")
            manifest = replace(manifest, planned_at=start.planned_at)
            return ResumePlan(manifest, self._parts, starts_over=True)
        agreed = agree_on_plan(self.shared, manifest, if_exists)
        FreshStart(self.writer.team, manifest.planned_at, if_exists == "error").store(self.shared)
        return agreed

    def _resumed(self, manifest: Manifest, start: FreshStart | None) -> ResumePlan:
        begins_elsewhere = start is not None and not start.is_clear
        if begins_elsewhere and self._siblings_live():
            raise self._refusal("others are about to start over in")
        if begins_elsewhere:  # who wrote that has died
            with storage_errors(self.shared.shards, "delete"):
                self.shared.files.delete(self.shared.shards)
        agreed = agree_on_plan(self.shared, manifest, "resume")
        if not agreed.starts_over:
            return agreed
        if self._siblings_live():
            raise self._refusal("others have begun another job in")
        clear_output(self.shared, agreed)  # at once: no row of it is finished
        return replace(agreed, starts_over=False)

    def _own_part_of(
        self, agreed: ResumePlan, owned: range | None, *, trusts_records: bool
    ) -> ResumePlan:
        work = replace(agreed, todo=self.parts, owned=owned)
        if work.starts_over or not has_finished_rows(self.out):
            return work
        if trusts_records:
            return replace(work, todo=self.unrecorded(self.parts))
        work = only_unfinished(self.out, work)
        for part in work.todo:
            if part.name in work.damaged:  # or a sibling would end the job with it
                with storage_errors(self.out.parts, "delete"):
                    self.out.files.delete(self.out.record(part))
        return work

    def _siblings_live(self) -> bool:
        return any(
            writer.team == self.writer.team and lives(self.shared, writer)
            for writer in writers_seen(self.shared)
            if writer != self.writer
        )

    def _refusal(self, what: str) -> LockedError:
        return LockedError(
            f"{self.writer}: {what} {printable(str(self.out.root))}",
            hint="wait until they have ended, or use --output for another directory",
        )


class ClaimedParts:
    """The queue of a worker, which claims parts when its engine will soon need rows."""

    is_shared = True

    def __init__(
        self, claim: SharedClaim, work: ResumePlan, generated: pa.Schema, known: PartsToMake
    ) -> None:
        self.damaged = known.damaged
        self.missing = known.missing
        self.publish = claim.publish
        self.check = claim.claims.check
        self._claim = claim
        self._work = work
        self._generated = generated
        self._num_rows = 0
        """Rows of the parts claimed so far, most of which are made when more are claimed."""
        self._began = time.monotonic()

    def next(self, is_over: Callable[[], bool]) -> PartsToMake | None:
        """Claim parts; wait while there are none, but others make some: they may die."""
        claim, pause = self._claim, 0.1
        while not is_over():
            with wait_for(claim.shared.lock, for_anyone=True, is_over=is_over) as is_held:
                if not is_held:
                    return None
                living = claim.living()
                history = claim.count_deaths(self._work, self._generated, living)
                rows_per_s = self._num_rows / (time.monotonic() - self._began)
                taken, others_make = claim.deal(living, rows_per_s)
            if taken:
                self._num_rows += _num_rows(taken)
                # What a living writer of that name has left of an earlier life may be of use.
                beside = frozenset(writer.name for writer in living) - {claim.writer.name}
                work = replace(self._work, starts_over=False)
                return parts_of(claim.out, work, taken, self._generated, history, beside=beside)
            if not others_make:
                return None
            time.sleep(pause)
            pause = min(2 * pause, max(_POLL_S, claim.out.files.flush_every_s / 12))
        return None


def is_too_slow(part_rows: int, left_rows: int, rows_per_s: float, others: Sequence[float]) -> bool:
    """Whether the others would make all that is left before this worker has made one part.

    Args:
        part_rows: rows of the part.
        left_rows: rows that are not finished.
        rows_per_s: speed of this worker; 0: not known.
        others: speeds of the other workers.
    """
    if not rows_per_s or not any(others):
        return False
    without = max(left_rows / sum(others), part_rows / max(others))
    return part_rows / rows_per_s > _SLOWER * without


def _num_rows(parts: Sequence[Part]) -> int:
    return sum(part.num_rows for part in parts)


def claim_size(free: Sequence[Part], num_workers: int, window_rows: int) -> int:
    """How many parts to claim, of those that are free: a window's rows at most, one at least."""
    if not free:
        return 0
    window = max(1, window_rows // max(1, free[0].num_rows))
    return max(1, min(window, len(free) // (_CLAIMS_LEFT * num_workers)))
