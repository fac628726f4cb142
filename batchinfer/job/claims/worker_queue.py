"""Claims parts for a worker when its engine will soon need rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pyarrow as pa

from batchinfer.job.claims.crashed_rows import CrashHistory, count_deaths
from batchinfer.job.claims.part_queue import (
    PartQueue,
    PartsToMake,
    parts_of_writer,
    unfinished_rows,
)
from batchinfer.job.claims.writers import Claims, Writer, dead_logs, living_writers, wait_for
from batchinfer.job.output.commit import Draft
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import ResumePlan, unrecorded
from batchinfer.job.row_ranges import Part, RowIds

_CLAIMS_LEFT = 6
"""A claim takes at most 1 / (_CLAIMS_LEFT * number of workers) of the free parts, but at least one.
"""
_SLOWER = 1.15
"""A worker claims no part if it needs this many times longer for one part than the other workers
need for all remaining parts.
"""
_POLL_S = 0.5
"""Seconds between checks for parts that have become free; longer in an object store."""


class ClaimedParts(PartQueue):
    """Gives a worker parts that it claims under the shared lock.

    Args:
        parts: all parts that are not finished.
        publish, check: see ``PartQueue``.
        out: the output directory with this worker's lock and staging folder.
        shared: the output directory with the lock that the writers share.
        plan: the plan of the parts that the worker may claim.
        generated: the output's generated columns.
        num_workers: minimum number of workers to expect; more may be alive.
        window_rows: maximum number of rows to claim at a time.
    """

    is_shared = True

    def __init__(
        self,
        parts: PartsToMake,
        publish: Callable[[Part, Draft], object],
        check: Callable[[], None],
        *,
        out: OutputDir,
        shared: OutputDir,
        claims: Claims,
        plan: ResumePlan,
        generated: pa.Schema,
        num_workers: int,
        window_rows: int,
    ) -> None:
        super().__init__(parts, publish, check)
        self._out = out
        self._shared = shared
        self._claims = claims
        self._plan = replace(plan, starts_over=False)
        self._generated = generated
        self._num_workers = num_workers
        self._window_rows = window_rows
        self._todo: Sequence[Part] = plan.todo
        self._num_rows = 0
        """Number of rows claimed so far; most are finished when the worker claims more parts."""
        self._began = time.monotonic()

    def next(self, is_over: Callable[[], bool]) -> PartsToMake | None:
        pause = 0.1
        while not is_over():
            with wait_for(self._shared.lock, for_anyone=True, is_over=is_over) as is_held:
                if not is_held:
                    return None
                living = living_writers(self._shared, self._claims.writer)
                history = crash_history(
                    self._shared, self._out, self._plan, self._generated, living
                )
                taken, others_make = self._deal(living)
            if taken:
                self._num_rows += _num_rows(taken)
                # Exclude this worker's name: a dead writer may have stored tokens under the same
                # name, and this worker can resume them.
                other_names = frozenset(writer.name for writer in living) - {
                    self._claims.writer.name
                }
                return parts_of_writer(
                    self._out,
                    self._plan,
                    taken,
                    self._generated,
                    history,
                    other_writers=other_names,
                )
            if not others_make:
                return None
            time.sleep(pause)
            pause = min(2 * pause, max(_POLL_S, self._out.files.flush_every_s / 12))
        return None

    def _deal(self, living: Sequence[Writer]) -> tuple[list[Part], bool]:
        """Claim free parts; return them, and True if other writers still work on parts.

        The caller holds the directory's lock.

        A claim is a share of the remaining parts, so that claims become smaller toward the end
        (guided self-scheduling; Polychronopoulos and Kuck, 1987).
        """
        claimed = self._claims.claimed
        other_claims = [
            Claims(self._shared, each) for each in living if each != self._claims.writer
        ]
        theirs = set[int]().union(*(claims.claimed for claims in other_claims))
        left = unrecorded(self._shared, self._plan.parts)
        free = [part for part in left if part.index not in theirs | claimed]
        held = [part for part in left if part.index in theirs]
        self._note_made_elsewhere(claimed | {part.index for part in left})
        num_workers = max(self._num_workers, sum(each.number is not None for each in living))
        taken = free[: claim_size(free, num_workers, self._window_rows)]
        rows_per_s = self._num_rows / (time.monotonic() - self._began)
        speeds = [claims.rows_per_s for claims in other_claims]
        num_left = _num_rows(free) + _num_rows(held) // 2  # on average, half of a held part is done
        if taken and is_too_slow(taken[0].num_rows, num_left, rows_per_s, speeds):
            return [], True
        if taken:
            self._claims.add([range(part.index, part.index + 1) for part in taken], rows_per_s)
        return taken, bool(held)

    def _note_made_elsewhere(self, own_or_left: set[int]) -> None:
        made = [part for part in self._todo if part.index not in own_or_left]
        if made:
            self.on_made_elsewhere(made)
            self._todo = [part for part in self._todo if part.index in own_or_left]


def crash_history(
    shared: OutputDir,
    out: OutputDir,
    plan: ResumePlan,
    generated: pa.Schema,
    living: Sequence[Writer],
) -> CrashHistory:
    """Count new deaths, and return the crash history of all rows, under the directory's lock."""

    def unfinished(rows: RowIds) -> RowIds:
        return unfinished_rows(out, plan, generated, rows)

    return count_deaths(shared, dead_logs(shared, living), unfinished)


def is_too_slow(
    part_rows: int, left_rows: int, rows_per_s: float, other_speeds: Sequence[float]
) -> bool:
    """Return True if the other workers would finish the job before this worker wrote one part.

    Args:
        part_rows: rows of the part.
        left_rows: unfinished rows.
        rows_per_s: speed of this worker; 0 if unknown.
        other_speeds: speeds of the other workers.
    """
    if not rows_per_s or not any(other_speeds):
        return False
    without = max(left_rows / sum(other_speeds), part_rows / max(other_speeds))
    return part_rows / rows_per_s > _SLOWER * without


def claim_size(free: Sequence[Part], num_workers: int, window_rows: int) -> int:
    """Return the number of free parts to claim: at least one, but no more than about a window of
    rows."""
    if not free:
        return 0
    window = max(1, window_rows // max(1, free[0].num_rows))
    return max(1, min(window, len(free) // (_CLAIMS_LEFT * num_workers)))


def _num_rows(parts: Sequence[Part]) -> int:
    return sum(part.num_rows for part in parts)
