"""What a worker tells of its way through leases: each event in the fields of its next report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from batchinfer.console.meter import Counts
from batchinfer.engine.stats import StepStats
from batchinfer.job.fleet.files.outbox import Outbox
from batchinfer.job.fleet.messages import Failure, WorkerReport
from batchinfer.job.output.commit import Draft
from batchinfer.job.row_ids import RowIds


class WorkerReports:
    """Tells a worker's driver what has happened; to the engine's loop it is a ``Progress``.

    Args:
        count_unadmitted: rows of all leases that the engine has not got yet. Asked when a report is
            written: several threads tell.
    """

    def __init__(self, outbox: Outbox, count_unadmitted: Callable[[], int]) -> None:
        self._outbox = outbox
        self._count_unadmitted = count_unadmitted

    def took(self, fence: int) -> None:
        """A lease has been taken up."""
        self._outbox.tell(lambda report: self._counted(replace(report, latest_fence=fence)))

    def admitted(self) -> None:
        """The engine has got rows; where it has all, the driver should know at once."""
        self._outbox.tell(self._counted, urgent=not self._count_unadmitted())

    def gave_back(self, rows: Sequence[tuple[int, RowIds]]) -> None:
        """Rows were asked for, and these are given back, by fence; perhaps none."""
        self._outbox.tell(
            lambda report: self._counted(
                replace(report, given_back=(*report.given_back, tuple(rows)))
            )
        )

    def ended(self, fence: int) -> None:
        """All rows of a lease are on disk."""
        self._outbox.tell(lambda report: replace(report, ended=(*report.ended, fence)))

    def staged(self, draft: Draft) -> None:
        """A part has been made."""
        self._outbox.tell(lambda report: replace(report, drafts=(*report.drafts, draft)))

    def wrote(self, segment: str, groups: Mapping[int, int]) -> None:
        """A segment has been written: its row group of each part's rows, by the part's index."""
        self._outbox.tell(
            lambda report: replace(report, segments={**report.segments, segment: groups}),
            urgent=False,
        )

    def is_over(self, failure: Failure | None) -> None:
        """The worker has ended, in order or by a failure."""
        self._outbox.tell(lambda report: replace(report, failure=failure, is_over=True))

    def update(self, added: Counts, stats: StepStats | None) -> None:
        """Count what a step has finished; as ``Progress`` has it."""
        use = None if stats is None else stats.pool_use
        self._outbox.tell(
            lambda report: replace(report, counts=report.counts + added, pool_use=use),
            urgent=False,
        )

    def fail(self, rows: int) -> None:
        """Count rows that ended in an error; as ``Progress`` has it."""
        self._count(Counts(failed=rows))

    def reuse(self, rows: int) -> None:
        """Count rows that were copied; as ``Progress`` has it."""
        self._count(Counts(reused=rows))

    def _count(self, added: Counts) -> None:
        self._outbox.tell(
            lambda report: replace(report, counts=report.counts + added), urgent=False
        )

    def note(self, text: str) -> None:
        """Nothing is shown here."""

    def close(self) -> None:
        """Nothing is shown here."""

    def _counted(self, report: WorkerReport) -> WorkerReport:
        return replace(report, num_unadmitted=self._count_unadmitted())
