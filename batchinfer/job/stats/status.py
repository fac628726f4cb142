"""``batchinfer status``: shows a job's progress from its files, even if another machine runs it."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.console.format import duration, printable, whole_percent
from batchinfer.console.phases import phase_line
from batchinfer.console.table import SummaryLine, draws_tables, plain, table_panel
from batchinfer.console.terminal import print_line
from batchinfer.errors import DataError
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.records.part_record import PartRecord
from batchinfer.job.output.resume import plan_of
from batchinfer.job.row_ranges import NO_ROWS, Part, in_range
from batchinfer.job.stats.first_errors import error_lines, first_errors
from batchinfer.job.stats.latest_runs import Worker, any_lock_lives, latest_workers
from batchinfer.job.stats.live import LiveRun, live_runs
from batchinfer.job.stats.run_record import runs_of
from batchinfer.process.process import stop_signals


@dataclass(frozen=True)
class Update:
    """Progress of the next generation of an output, which ``run --update`` makes."""

    rows_total: int
    rows_done: int
    is_being_placed: bool
    """True if the generation is complete and about to replace the current generation."""

    @property
    def line(self) -> SummaryLine:
        if self.is_being_placed:
            note = ", but the output still has some of the old files; run the job again to finish"
            return SummaryLine("update", "computed", note)
        done = f"{self.rows_done:,} of {self.rows_total:,} rows"
        return SummaryLine("update", done, " of the update; the output still has the old rows")


@dataclass(frozen=True)
class Status:
    state: str
    """``running`` (also while the model loads), ``stopped``, ``failed``, ``finished``, or
    ``finished_with_errors`` if more rows failed than the job allows."""
    rows_total: int
    rows_done: int
    """Number of finished rows, which will not run again."""
    rows_error: int
    parts_total: int
    parts_done: int
    runs: int
    rows_per_s: float | None
    """Total speed of the latest runs; None before a row is finished."""
    eta_s: float | None
    """Seconds left; None unless the job is running and its speed is known."""
    pool_use: float | None
    """Share of KV blocks used in the latest step, averaged over workers."""
    saved_at: float | None
    """Time when the latest run last wrote its record, in seconds since 1970."""
    workers: list[Worker]
    """The latest runs if several runs write to the output, else empty."""
    phase: str | None = None
    """Phase that all runs wait for, such as loading the model; None while rows run."""
    share: float | None = None
    """Share of the work that is done, from 0 to 1, including tokens of running rows. This field and
    the next three are None unless a run reports its progress."""
    rows_running: int | None = None
    output_tokens: int | None = None
    """Number of tokens that the current runs have drawn."""
    tokens_per_s: float | None = None
    eta_is_most: bool = False
    """True if ``eta_s`` is an upper bound that assumes ``max_tokens`` for every row."""
    error: str | None = None
    """Error of the latest runs; None if they did not fail, or died without a message."""
    error_codes: Mapping[str, int] = field(default_factory=dict)
    """Number of failed rows in finished parts, keyed by error code, most frequent first."""
    first_errors: Sequence[Mapping[str, Any]] = ()
    update: Update | None = None
    """Progress of the next generation, if an update has begun."""

    def data(self) -> dict[str, Any]:
        """Return the values that ``--json`` prints."""
        return asdict(self)

    def facts(self) -> Iterator[SummaryLine]:
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
        if (work := self._work) is not None:
            note = ", including the work on running rows"
            yield SummaryLine("work", whole_percent(work), note, share=work)
        yield from error_lines(self.error_codes, self.first_errors)
        if self.phase is not None:
            yield SummaryLine("phase", self.phase)
        yield SummaryLine("parts", f"{self.parts_done:,} of {self.parts_total:,}")
        if self.rows_per_s is not None:
            note = f" in the latest of {self.runs:,} runs" if self.runs > 1 else ""
            if self.workers:
                running = sum(worker.state == "running" for worker in self.workers)
                count = f"{len(self.workers):,} workers"
                note = f", {running:,} of {count} running" if running else f", {count}"
            yield SummaryLine("speed", f"{self.rows_per_s:,.1f} rows/s", note)
        if self.tokens_per_s is not None and self.output_tokens:
            each = f", {self.tokens_per_s:,.0f} per second"
            yield SummaryLine("tokens", f"{self.output_tokens:,} in answers", each)
        if self.update is not None:
            yield self.update.line
        if self.eta_s is not None:
            yield SummaryLine("left", self._left)
        if self.pool_use is not None:
            of = (
                "each worker's blocks are used, on average"
                if self.workers
                else "the blocks are used"
            )
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
        """Value of ``share``, if running rows make it differ from the share of finished rows."""
        return self.share if self.rows_running else None

    @property
    def _running(self) -> str:
        return f", {self.rows_running:,} in the engine" if self.rows_running else ""

    @property
    def _left(self) -> str:
        assert self.eta_s is not None
        return f"{'at most' if self.eta_is_most else 'about'} {duration(self.eta_s)}"

    def line(self) -> str:
        """Return the status as one line, for a log."""
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
        return plain(self.facts())


def read_status(out: OutputDir, now: float) -> Status:
    """Return the status, at ``now`` in seconds since 1970, of the job that writes to ``out``. Raise
    DataError if ``out`` holds no job's output, or if its plan is damaged."""
    plan = plan_of(out)
    # Read segments before records, so that rows moved from a segment to a part are not missed.
    segments = list(_segment_rows(out))
    records = out.of_each(partial(_record, out), plan.parts())
    done, errors = _count(plan, records, segments)
    codes = Counter[str]()
    for record in filter(None, records):
        codes.update(record.error_codes)
    runs = list(runs_of(out))
    workers = latest_workers(out, runs, now)
    computing = [worker for worker in workers if worker.state == "running"]
    live = live_runs(out, now)
    running = bool(computing or live) or any_lock_lives(out)
    reasons = "\n".join(
        f"{worker.worker} failed: {worker.error}" if worker.worker else worker.error
        for worker in workers
        if worker.error
    )
    state = _state(out, running, errors > 0 and done == plan.num_rows, bool(reasons))
    speed = sum(worker.rows_per_s or 0.0 for worker in computing or workers) or None
    status = Status(
        state=state,
        rows_total=plan.num_rows,
        rows_done=done,
        rows_error=errors,
        parts_total=len(plan.parts()),
        parts_done=sum(record is not None for record in records),
        runs=len(runs),
        rows_per_s=speed,
        eta_s=(plan.num_rows - done) / speed if speed and computing else None,
        pool_use=_mean(worker.pool_use for worker in computing),
        saved_at=max((worker.saved_at for worker in workers), default=None),
        workers=workers if any(worker.worker for worker in workers) else [],
        error=reasons if state == "failed" else None,
        error_codes=dict(codes.most_common()),
        first_errors=first_errors(out, plan, records),
        update=_read_update(out, now),
    )
    return _with_live(status, live) if live and state == "running" else status


def _with_live(status: Status, live: Sequence[LiveRun]) -> Status:
    """Return the status with the progress that runs report, which is newer than their records.

    Each shard reports only its own rows. The rows of other shards are counted from the records on
    disk.
    """
    waiting = [run for run in live if run.phase]
    phase = None
    if len(waiting) == len(live):
        phase = phase_line(waiting[0].phase, waiting[0].phase_detail, waiting[0].phase_s)
    unsaved = sum(run.rows_done - run.rows_finished for run in live)
    reported = sum(run.rows_finished for run in live)
    newest = max(status.rows_done, reported)
    etas = [run.eta_s for run in live if run.eta_s is not None]
    pool_use = _mean(run.pool_use for run in live)
    return replace(
        status,
        phase=phase and printable(phase),
        share=min(1.0, (newest + unsaved) / max(1, status.rows_total)),
        # Rows that were written after the report are not running anymore.
        rows_running=max(0, sum(run.rows_running for run in live) - (newest - reported)),
        output_tokens=sum(run.output_tokens for run in live),
        tokens_per_s=sum(run.tokens_per_s for run in live),
        eta_s=max(etas) if len(etas) == len(live) else status.eta_s,
        eta_is_most=any(run.is_most for run in live),
        pool_use=status.pool_use if pool_use is None else pool_use,
    )


def _read_update(out: OutputDir, now: float) -> Update | None:
    statuses = []
    for path in out.files.entries(out.next):
        with suppress(DataError):
            statuses.append(read_status(out.generation(path.name), now))
    if not statuses:
        return None
    latest = max(statuses, key=lambda status: status.saved_at or 0.0)
    is_being_placed = out.files.stat(out.swap) is not None
    return Update(latest.rows_total, latest.rows_done, is_being_placed)


def _mean(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else None


def _state(out: OutputDir, running: bool, done_with_errors: bool, failed: bool) -> str:
    if out.files.stat(out.success) is not None:
        return "finished"
    if running:
        return "running"
    # If all rows are done without errors, the run died before it wrote _SUCCESS, which the next run
    # will write.
    if done_with_errors:
        return "finished_with_errors"
    return "failed" if failed else "stopped"


def _segment_rows(out: OutputDir) -> Iterator[pa.Table]:
    for path in out.files.entries(out.segments):
        # A segment that disappears has been merged into a part.
        with suppress(OSError, pa.ArrowException), out.files.open(path) as file:
            yield pq.ParquetFile(file).read(["row_id", "status"], use_threads=False)


def _count(
    plan: Manifest, records: Sequence[PartRecord | None], segments: Sequence[pa.Table]
) -> tuple[int, int]:
    """Return how many rows of finished parts and segments are done, and how many of them failed."""
    done = errors = 0
    ids, failed_ids = [NO_ROWS], [NO_ROWS]
    for table in segments:
        ids.append(table["row_id"].to_numpy())
        failed_ids.append(ids[-1][table["status"].to_numpy(zero_copy_only=False) == "error"])
    waiting, waiting_failed = (np.unique(np.concatenate(some)) for some in (ids, failed_ids))
    for part, record in zip(plan.parts(), records, strict=True):
        if record is None:
            done += len(in_range(waiting, part.rows))
            errors += len(in_range(waiting_failed, part.rows))
        else:
            done += part.num_rows
            errors += sum(record.error_codes.values())
    return done, errors


def _record(out: OutputDir, part: Part) -> PartRecord | None:
    try:
        return out.read_record(part)
    except DataError:
        return None


def follow_status(out: OutputDir, every_s: float) -> None:
    """Show the status until the job stops running or the user interrupts the command.

    On a terminal, redraw the table; elsewhere, print a line at each update.

    Raises:
        DataError: ``out`` holds no job's output, or its plan is damaged.
    """
    with stop_signals() as stop:
        if not draws_tables(sys.stdout):
            _follow(out, lambda status: print_line(status.line()), every_s, stop)
            return
        from rich.console import Console
        from rich.live import Live

        title = f"status of {printable(str(out.root))}"
        screen = Console(file=sys.stdout, highlight=False)
        with Live(console=screen, auto_refresh=False) as live:

            def draw(status: Status) -> None:
                live.update(table_panel(title, status.facts()), refresh=True)

            _follow(out, draw, every_s, stop)


def _follow(out: OutputDir, show: Callable[[Status], None], every_s: float, stop: Event) -> None:
    while True:
        status = read_status(out, time.time())
        show(status)
        if status.state != "running" or stop.wait(every_s):
            return
