"""``batchinfer status``: progress of a job, from its files alone; it may run here or elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.console.format import duration, printable, whole_percent
from batchinfer.console.phases import phase_line
from batchinfer.console.table import SummaryLine, plain
from batchinfer.errors import DataError
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.part_record import PartRecord
from batchinfer.job.output.resume import plan_of
from batchinfer.job.row_ids import NO_ROWS, Part, in_range
from batchinfer.job.stats.first_errors import error_lines, first_errors
from batchinfer.job.stats.live import LiveRun, live_runs
from batchinfer.job.stats.recorder import runs_of
from batchinfer.job.stats.workers import Worker, any_lock_lives, latest_workers


@dataclass(frozen=True)
class Update:
    """A generation that is to take the place of what is there (``run --update``)."""

    rows_total: int
    rows_done: int
    is_being_placed: bool
    """Whether it is made, and is being put in its place, or its run was cut off at that."""

    @property
    def line(self) -> SummaryLine:
        """What is said of it."""
        if self.is_being_placed:
            return SummaryLine("update", "made", ", being put in its place; run again to end that")
        done = f"{self.rows_done:,} of {self.rows_total:,} rows"
        return SummaryLine("update", done, " of the next generation; what is here is the last one")


@dataclass(frozen=True)
class Status:
    """State, progress and speed of a job."""

    state: str
    """``running`` (also while the model loads), ``stopped``, ``failed``, ``finished``, or
    ``finished_with_errors``: more rows failed than the job allows."""
    rows_total: int
    rows_done: int
    """Rows that will not run again."""
    rows_error: int
    parts_total: int
    parts_done: int
    runs: int
    rows_per_s: float | None
    """Speed of the latest run, or of those beside each other that run or ran last, together; None
    before a row is finished."""
    eta_s: float | None
    """Seconds until it ends; None unless it is running, and has a speed."""
    pool_use: float | None
    """Used share of the KV blocks in the latest run's last step; of several, the mean."""
    saved_at: float | None
    """When the latest run last wrote, in seconds since 1970."""
    workers: list[Worker]
    """The latest runs, where several write to one output; else empty."""
    phase: str | None = None
    """What is waited for before rows run or after, such as loading the model; None: nothing."""
    share: float | None = None
    """Share of the rows that is done, that of the running ones by their tokens included; from 0 to
    1; this and what follows is None unless it is running and tells."""
    rows_running: int | None = None
    output_tokens: int | None = None
    """Drawn by the runs that go on."""
    tokens_per_s: float | None = None
    eta_is_most: bool = False
    """Whether ``eta_s`` is an upper bound: no row is finished yet, and each is taken to draw the
    most that it may."""
    error: str | None = None
    """Why the latest run failed, or those of them that did; None: it did not, or died without a
    word."""
    error_codes: Mapping[str, int] = field(default_factory=dict)
    """Failed rows of finished parts by their codes, the most first."""
    first_errors: Sequence[Mapping[str, Any]] = ()
    """Of finished parts; see ``first_errors``."""
    update: Update | None = None
    """The next generation, if one was begun; all else is of the one there is."""

    def data(self) -> dict[str, Any]:
        """The values of ``--json``."""
        return asdict(self)

    def facts(self) -> Iterator[SummaryLine]:
        """Lines of the table on a terminal."""
        bad = dict.fromkeys(("finished_with_errors", "stopped", "failed"), "bad")
        tones = {"finished": "good", **bad}
        yield SummaryLine("state", self.state.replace("_", " "), tone=tones.get(self.state, ""))
        if self.error is not None:
            yield SummaryLine("error", printable(self.error.partition("\n")[0]), tone="bad")
        yield SummaryLine(
            "rows",
            f"{self.rows_done:,} of {self.rows_total:,} ({whole_percent(self._rows_share)})",
            f", {self.rows_error:,} failed{self._running}",
            share=self._rows_share,
        )
        if self._work is not None:
            counted = ", with what rows in the engine have done"
            yield SummaryLine("work", whole_percent(self._work), counted, share=self._work)
        yield from error_lines(self.error_codes, self.first_errors)
        if self.phase is not None:
            yield SummaryLine("phase", self.phase)
        yield SummaryLine("parts", f"{self.parts_done:,} of {self.parts_total:,}")
        if self.rows_per_s is not None:
            latest = f" in the latest of {self.runs:,} runs" if self.runs > 1 else ""
            if self.workers:
                running = sum(worker.state == "running" for worker in self.workers)
                some = f"{running:,} of " if running else ""
                latest = f", {some}{len(self.workers):,} workers{' running' if running else ''}"
            yield SummaryLine("speed", f"{self.rows_per_s:,.1f} rows/s", latest)
        if self.tokens_per_s is not None and self.output_tokens:
            each = f", {self.tokens_per_s:,.0f} per second"
            yield SummaryLine("tokens", f"{self.output_tokens:,} out", each)
        if self.update is not None:
            yield self.update.line
        if self.eta_s is not None:
            yield SummaryLine("left", self._left)
        if self.pool_use is not None:
            of = "each worker's blocks used, on average" if self.workers else "the blocks used"
            yield SummaryLine("pool", f"{self.pool_use:.0%}", f" of {of}", share=self.pool_use)
        for worker in self.workers:
            speed = "" if worker.rows_per_s is None else f", {worker.rows_per_s:,.1f} rows/s"
            yield SummaryLine(
                worker.worker,
                worker.state,
                f", {worker.rows:,} rows{speed}",
                tone=tones.get(worker.state, ""),
            )

    @property
    def _rows_share(self) -> float:
        return self.rows_done / self.rows_total if self.rows_total else 1.0

    @property
    def _work(self) -> float | None:
        """``share`` where it is another than that of the rows: some run."""
        return self.share if self.rows_running else None

    @property
    def _running(self) -> str:
        return f", {self.rows_running:,} in the engine" if self.rows_running else ""

    @property
    def _left(self) -> str:
        assert self.eta_s is not None
        return f"{'at most' if self.eta_is_most else 'about'} {duration(self.eta_s)}"

    def line(self) -> str:
        """The whole on one line, for a log."""
        parts = [
            self.state.replace("_", " "),
            *([] if self.phase is None else [self.phase]),
            f"{self.rows_done:,} of {self.rows_total:,} rows ({whole_percent(self._rows_share)})"
            f"{self._running}",
        ]
        if self._work is not None:
            parts.append(f"{whole_percent(self._work)} of the work done")
        if self.tokens_per_s is not None and self.output_tokens:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        elif self.state == "running" and self.rows_per_s is not None:
            parts.append(f"{self.rows_per_s:,.1f} rows/s")
        if self.pool_use is not None:
            parts.append(f"pool {self.pool_use:.0%}")
        if self.eta_s is not None:
            parts.append(f"{self._left} left")
        return ", ".join(parts)

    def lines(self) -> Iterator[str]:
        """Lines of text, for where there is no terminal."""
        return plain(self.facts())


def read_status(out: OutputDir, now: float) -> Status:
    """State, progress and speed of the job that writes to ``out``.

    Args:
        now: seconds since 1970.

    Raises:
        DataError: there is no job's output, or its plan is damaged.
    """
    plan = plan_of(out)
    segments = list(_segment_rows(out))  # before the records: rows move from here to there
    records = out.of_each(partial(_record, out), plan.parts())
    done, errors, parts_done = _count(plan, records, segments)
    runs = list(runs_of(out))
    workers = latest_workers(out, runs, now)
    computing = [worker for worker in workers if worker.state == "running"]
    live = live_runs(out, now)
    running = bool(computing or live) or any_lock_lives(out)
    reasons = _reasons(workers)
    state = _state(out, running, errors > 0 and done == plan.num_rows, reasons is not None)
    speed = _sum(worker.rows_per_s for worker in computing or workers)
    pools = [worker.pool_use for worker in computing if worker.pool_use is not None]
    found = Status(
        state=state,
        rows_total=plan.num_rows,
        rows_done=done,
        rows_error=errors,
        parts_total=len(plan.parts()),
        parts_done=parts_done,
        runs=len(runs),
        rows_per_s=speed,
        eta_s=(plan.num_rows - done) / speed if speed and computing else None,
        pool_use=sum(pools) / len(pools) if pools else None,
        saved_at=max((worker.saved_at for worker in workers), default=None),
        workers=workers if any(worker.worker for worker in workers) else [],
        error=reasons if state == "failed" else None,
        error_codes=_error_codes(records),
        first_errors=first_errors(out, plan, records),
        update=_read_update(out, now),
    )
    return _with_live(found, live) if live and state == "running" else found


def _with_live(status: Status, live: Sequence[LiveRun]) -> Status:
    """A status with what the runs tell of themselves, which is newer than what they have on disk.

    Of shards, each tells of its own rows; those of others that do not run are as on disk.
    """
    waits = [run for run in live if run.phase]
    unsaved = sum(run.rows_done - run.rows_finished for run in live)
    told = sum(run.rows_finished for run in live)
    newest = max(status.rows_done, told)
    etas = [run.eta_s for run in live if run.eta_s is not None]
    pools = [run.pool_use for run in live if run.pool_use is not None]
    total = max(1, status.rows_total)
    return replace(
        status,
        phase=_phase_of(waits[0]) if waits and len(waits) == len(live) else None,
        share=min(1.0, (newest + unsaved) / total),
        # Rows on disk may be newer than what was told last: those do not run any more.
        rows_running=max(0, sum(run.rows_running for run in live) - (newest - told)),
        output_tokens=sum(run.output_tokens for run in live),
        tokens_per_s=sum(run.tokens_per_s for run in live),
        eta_s=max(etas) if len(etas) == len(live) else status.eta_s,
        eta_is_most=any(run.is_most for run in live),
        pool_use=sum(pools) / len(pools) if pools else status.pool_use,
    )


def _phase_of(run: LiveRun) -> str:
    return printable(phase_line(run.phase, run.phase_detail, run.phase_s))


def _read_update(out: OutputDir, now: float) -> Update | None:
    """The generation that was worked on last."""
    found = []
    for path in out.files.entries(out.next):
        with suppress(DataError):
            found.append(read_status(out.generation(path.name), now))
    if not found:
        return None
    latest = max(found, key=lambda status: status.saved_at or 0.0)
    is_being_placed = out.files.stat(out.swap) is not None
    return Update(latest.rows_total, latest.rows_done, is_being_placed)


def _reasons(workers: Sequence[Worker]) -> str | None:
    """Why the latest runs failed, a line or more each; those beside others are named."""
    return (
        "\n".join(
            f"{worker.worker} failed: {worker.error}" if worker.worker else worker.error
            for worker in workers
            if worker.error
        )
        or None
    )


def _sum(speeds: Iterable[float | None]) -> float | None:
    return sum(speed for speed in speeds if speed is not None) or None


def _state(out: OutputDir, running: bool, done_with_errors: bool, failed: bool) -> str:
    if out.files.stat(out.success) is not None:
        return "finished"
    if running:
        return "running"
    # without errors, a run was cut off just before it wrote _SUCCESS: another one will
    if done_with_errors:
        return "finished_with_errors"
    return "failed" if failed else "stopped"


def _segment_rows(out: OutputDir) -> Iterator[pa.Table]:
    for path in out.files.entries(out.segments):
        # One that goes meanwhile has been put into a part.
        with suppress(OSError, pa.ArrowException), out.files.open(path) as file:
            yield pq.ParquetFile(file).read(["row_id", "status"], use_threads=False)


def _count(
    plan: Manifest, records: Sequence[PartRecord | None], segments: list[pa.Table]
) -> tuple[int, int, int]:
    """Rows done, rows failed, parts done."""
    done = errors = parts_done = 0
    ids = [table["row_id"].to_numpy() for table in segments]
    failed = [
        row_ids[table["status"].to_numpy(zero_copy_only=False) == "error"]
        for row_ids, table in zip(ids, segments, strict=True)
    ]
    waiting, waiting_failed = (
        np.unique(np.concatenate([NO_ROWS, *some])) for some in (ids, failed)
    )
    for part, record in zip(plan.parts(), records, strict=True):
        if record is None:
            done += len(in_range(waiting, part.rows))
            errors += len(in_range(waiting_failed, part.rows))
        else:
            done += part.num_rows
            errors += sum(record.error_codes.values())
            parts_done += 1
    return done, errors, parts_done


def _error_codes(records: Iterable[PartRecord | None]) -> dict[str, int]:
    codes = Counter[str]()
    for record in records:
        codes.update({} if record is None else record.error_codes)
    return dict(codes.most_common())


def _record(out: OutputDir, part: Part) -> PartRecord | None:
    try:
        return out.read_record(part)
    except DataError:
        return None
