"""The three threads that take each row from the input to the output.

    reads        read_prompts -> plan_windows     Prefetcher, paced by ReadAhead
                       | PromptRow
    runs         EngineLoop.run                   the thread that called run_pipeline
                       | TurnResult
    writes       LoadedTask.finish -> PartWriter  BackgroundConsumer, at most 64 turns behind
                 TokenUpdate -> TokenFiles        every few seconds

A row becomes, in this order, a ``Row`` of values, a ``PromptRow``, a ``Request``, a
``RequestState`` with its sequences, a ``Completion``, a ``RowResult`` and a ``FinishedRow``.

Bounded queues between the threads apply backpressure. At most two windows are in memory, usually
little more than one: the next window is read shortly before the engine needs it. The parts come
from a ``PartQueue``, a few at a time. Rows of the next parts are read while rows of earlier parts
still run, so that the engine never drains.
"""

from __future__ import annotations

import hashlib
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath
from threading import Event

import pyarrow as pa

from batchinfer.console.meter import Counts
from batchinfer.console.phases import phase
from batchinfer.console.progress_bar import Progress
from batchinfer.errors import JobError, RowError
from batchinfer.job.claims.part_queue import PartQueue, PartsToMake
from batchinfer.job.job import Job, LoadedJob, OutputJob, row_keys
from batchinfer.job.output.explode import METADATA as EXPLODED
from batchinfer.job.output.part_writer import PartWriter
from batchinfer.job.reuse.reuse import FoundRows, RowReuse
from batchinfer.job.rows.finished_row import FinishedRow, failed_row
from batchinfer.job.rows.read_prompts import read_prompts
from batchinfer.job.rows.row_order import plan_windows
from batchinfer.job.rows.task import LoadedTask
from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.run.engine_loop import EngineLoop, RowResult, TurnResult
from batchinfer.job.run.in_flight_log import InFlightLog
from batchinfer.job.run.read_ahead import ReadAhead
from batchinfer.job.run.threads import BackgroundConsumer, Prefetcher
from batchinfer.job.stats.run_record import RunRecorder, package_versions
from batchinfer.job.tokens.in_flight import TokensInFlight, TokenUpdate
from batchinfer.job.tokens.token_files import TokenFiles
from batchinfer.process.process import gc_frozen
from batchinfer.requests.requests import PromptRow

_WRITES_DUE = 64  # maximum number of turns by which the writer may lag behind the engine loop
_POLL_S = 0.02
CRASHED = RowError("crashed_engine", "the process died twice while this row ran alone")
"""Error of a row that is given up because it kills the process."""

_ToWrite = TurnResult | FoundRows | TokenUpdate | PartsToMake


def run_pipeline(
    job: OutputJob,
    queue: PartQueue,
    loaded: LoadedJob | None,
    progress: Progress,
    stop: Event,
    reuse: RowReuse | None = None,
) -> bool:
    """Compute and write the parts of a queue.

    Args:
        loaded: the job's model; None if no row has to run.
        stop: event that stops the run: once it is set, no more engine steps start.
        reuse: finds rows that need not run because another output holds them.

    Returns:
        True if all parts were written.

    Raises:
        JobError: data cannot be read, the model cannot be run, or a part cannot be written;
            finished rows are kept.
    """
    recorder = RunRecorder(job.out, job.spec, job.out.next_run_id)
    writers = _PartWriters(job, queue, recorder, progress)
    with _flushed_on_exit(recorder, writers):
        if loaded is None:
            while (claim := queue.next(stop.is_set)) is not None:
                writers.begin(claim)
            return not stop.is_set()
        recorder.loaded(loaded.context, loaded.seconds)
        for line in loaded.log:
            recorder.log(line)
        run_id = recorder.run.run_id
        with InFlightLog(job.out, run_id) as in_flight:
            tokens = TokenFiles(job.out, job.manifest, loaded.context.adapters, run_id)
            rows = RowPipeline(
                job, queue, loaded, recorder, writers, tokens, in_flight, progress, stop, reuse
            )
            return rows.run()


@contextmanager
def _flushed_on_exit(recorder: RunRecorder, writers: _PartWriters) -> Iterator[None]:
    """When the run in this context ends or fails, write its finished rows and its record."""
    try:
        yield
    except BaseException as error:
        with suppress(JobError):
            writers.flush()
        with suppress(JobError):  # a full disk may still have room for the error
            recorder.end(error)
        raise
    writers.flush()
    recorder.end()


class _PartWriters:
    """Holds the part writers of a run, one for each claim with unwritten parts."""

    def __init__(
        self, job: OutputJob, queue: PartQueue, recorder: RunRecorder, progress: Progress
    ) -> None:
        self._job = job
        self._queue = queue
        self._recorder = recorder
        self._progress = progress
        self._metadata = file_metadata(job)
        self._first_rows = [part.rows.start for part in job.manifest.parts()]
        self._of_part: dict[int, PartWriter] = {}

    def begin(self, claim: PartsToMake) -> None:
        """Write the complete parts of a claim, and get ready for the rows of its other parts."""
        writer = PartWriter(
            self._job.out,
            claim.parts,
            claim.segments,
            claim.finished,
            self._job.table,
            self._job.source,
            self._metadata,
            self._before_write,
            self._queue.publish,
        )
        self._of_part = {index: one for index, one in self._of_part.items() if not one.is_done}
        self._of_part |= {part.index: writer for part in claim.parts}
        writer.write_complete()
        for row_id in claim.crashes.given_up:
            writer.add(fail_row(self._job, row_id, CRASHED))
            self._progress.update(Counts(rows=1), None)
            self._progress.fail(1)

    def add(self, row: FinishedRow) -> None:
        self._of(row.values["row_id"]).add(row)

    def add_table(self, rows: pa.Table) -> None:
        """Add finished rows of one claim."""
        if rows.num_rows:
            self._of(rows["row_id"][0].as_py()).add_table(rows)

    def flush_if_due(self) -> None:
        for writer in set(self._of_part.values()):
            writer.flush_if_due()

    def flush(self) -> None:
        for writer in set(self._of_part.values()):
            writer.flush()
        if not self._of_part:
            self._recorder.checkpoint()

    def _before_write(self) -> None:
        self._queue.check()
        self._recorder.checkpoint()

    def _of(self, row_id: int) -> PartWriter:
        return self._of_part[bisect_right(self._first_rows, row_id) - 1]


@dataclass
class RowPipeline:
    job: OutputJob
    queue: PartQueue
    loaded: LoadedJob
    recorder: RunRecorder
    writers: _PartWriters
    token_files: TokenFiles
    in_flight: InFlightLog
    progress: Progress
    stop: Event
    reuse: RowReuse | None

    def __post_init__(self) -> None:
        self._tokens = TokensInFlight(self.job.out.files.flush_every_s, self.progress, {})
        self._waiting: PartsToMake | None = None
        """The next claim, whose rows are not being read yet; None if there is no such claim."""
        self._num_coming = 0
        """Number of rows to run in all claims so far."""
        self._num_given = 0
        """Number of rows that earlier engine loops have given to the engine."""

    def run(self) -> bool:
        """Compute and write all parts of the queue; return False if the run was stopped first.

        Rows that may have killed earlier runs (suspects) run in groups, without other rows.
        """
        while not self.stop.is_set():
            if self._waiting is None:
                claim = self.queue.next(self.stop.is_set)
                if claim is None:
                    break
                self._take_up(claim)
                self.writers.begin(claim)
                self._waiting = claim
            claim = self._waiting
            if not claim.suspects:
                self._tokens.is_row_alone = not self.queue.is_shared and _count(claim.missing) == 1
                if not self._run_rows(self._claims):
                    return False
                continue
            self._waiting, self.in_flight.at_once = None, True
            for ranges in claim.phases():
                self._tokens.is_row_alone = _count(ranges) == 1
                if not self._run_rows(lambda *_, c=claim, r=ranges: iter([(c, r)])):
                    return False
                # Write the finished rows before the next group starts, so that a crash affects only
                # one group.
                self.writers.flush()
            self._tokens.is_row_alone = False
        return not self.stop.is_set()

    def _take_up(self, claim: PartsToMake) -> None:
        kept, pace = self.token_files.recover(claim.missing, claim.other_writers)
        self._tokens.add(kept)
        if pace is not None:
            self._tokens.pace.follow(pace)
        self.in_flight.at_once = claim.crashes.is_held
        missing = sum(map(self.job.source.count, claim.missing))
        self._num_coming += missing - len(claim.crashes.given_up)

    def _claims(
        self, is_needed: Callable[[], bool], is_over: Callable[[], bool], put: Callable[..., None]
    ) -> Iterator[tuple[PartsToMake, Sequence[range]]]:
        """Yield claims that have no suspect rows, each with the rows to run.

        Wait before each claim until the engine will soon need more rows.
        """
        while self._waiting is not None and not self._waiting.suspects:
            claim, self._waiting = self._waiting, None
            for ranges in claim.phases():
                yield claim, ranges
            while not is_needed() and not is_over():
                time.sleep(_POLL_S)
            self._waiting = self.queue.next(is_over)
            if self._waiting is not None:
                self._take_up(self._waiting)
                put(self._waiting)

    def _run_rows(
        self, claims_of: Callable[..., Iterator[tuple[PartsToMake, Sequence[range]]]]
    ) -> bool:
        spec, context = self.job.spec, self.loaded.context
        ending, starved, cut_short = Event(), Event(), Event()
        # With a shared queue, take fewer rows in advance: other workers cannot run rows taken here.
        waiting = max(1, spec.engine.max_num_seqs // 2)
        loop = EngineLoop(
            context.engine,
            self.loaded.task,
            self.progress,
            self.stop,
            max_waiting=waiting if self.queue.is_shared else 2 * spec.engine.max_num_seqs,
            admit=self.in_flight.note,
            pace=self._tokens.pace,
        )

        def write(finished: _ToWrite) -> None:
            try:
                if not self._write(finished):
                    cut_short.set()
            except BaseException:
                # Set ``ending``, or the engine loop would wait for rows until the other workers
                # have finished their parts, while those workers wait for the parts of this worker.
                ending.set()
                raise

        def is_over() -> bool:
            return self.stop.is_set() or ending.is_set()

        def is_needed() -> bool:
            left = self._num_coming - self._num_given - loop.num_given
            return left < spec.engine.max_num_seqs

        complete = False
        with BackgroundConsumer(write, _WRITES_DUE) as writer:
            claims = claims_of(is_needed, is_over, writer.put)
            read_ahead = ReadAhead(loop, loop.max_waiting, is_over)
            batches = self._batches(claims, is_over, starved.is_set, read_ahead, writer.put)
            with self._prefetched(batches, is_over, starved, loop.max_waiting) as rows:
                try:
                    with gc_frozen():
                        with phase("reading and planning rows"):
                            rows.wait(self.stop)
                        with self._tokens.observing(context.engine, writer.put):
                            complete = loop.run(rows, writer.put)
                finally:
                    ending.set()
                    if not complete:
                        self.loaded.processes.stop()  # do not wait for the text processes
        self._num_given += loop.num_given
        return complete and not cut_short.is_set()

    @contextmanager
    def _prefetched(
        self,
        windows: Iterator[list[PromptRow]],
        is_over: Callable[[], bool],
        starved: Event,
        rows_ahead: int,
    ) -> Iterator[Prefetcher[list[PromptRow]]]:
        """Read one window ahead of the engine, and load the images of at most ``rows_ahead`` rows
        ahead."""
        if self.loaded.images is None:
            with Prefetcher(windows, 1, starved) as rows:
                yield rows
            return
        with Prefetcher(windows, 1) as planned:
            loaded = self.loaded.images.loaded(planned.items(is_over), is_over)
            with Prefetcher(loaded, rows_ahead, starved) as rows:
                yield rows

    def _write(self, finished: _ToWrite) -> bool:
        """Write finished rows or tokens; return False if writing was cut short."""
        match finished:
            case FoundRows():
                return self._copy(finished)
            case PartsToMake():
                self.writers.begin(finished)
            case TokenUpdate():
                self.writers.flush()  # first, because the update drops the tokens of finished rows
                self.token_files.write(finished)
            case TurnResult():
                self.recorder.add(finished.step, len(finished.rows))
                if finished.recovered is not None:
                    self.recorder.note_recovery(finished.recovered)
                for result in finished.rows:
                    row = finish_row(self.job, self.loaded.task, result)
                    self.writers.add(row)
                    if row.has_failed:
                        self.progress.fail(1)
                self.writers.flush_if_due()
        return True

    def _copy(self, found: FoundRows) -> bool:
        """Copy rows that another output holds; return False if the run was stopped first."""
        assert self.reuse is not None
        for table in self.reuse.copied(found):
            if self.stop.is_set():
                return False
            self.writers.add_table(table)
            self.writers.flush_if_due()
            self.progress.reuse(table.num_rows)
        return True

    def _batches(
        self,
        claims: Iterator[tuple[PartsToMake, Sequence[range]]],
        is_over: Callable[[], bool],
        is_starved: Callable[[], bool],
        read_ahead: ReadAhead,
        hand_over: Callable[[FoundRows], None],
    ) -> Iterator[list[PromptRow]]:
        """Yield the rows of ``claims`` that must run, in the order in which they should run.

        Args:
            is_over: returns True to end early.
            is_starved: returns True while the engine waits for rows.
            read_ahead: decides when to read the next window.
            hand_over: takes rows whose answers another output holds.
        """
        spec, loaded = self.job.spec, self.loaded
        keeps_text = "prompt" in spec.output.include

        def found(rows: FoundRows) -> None:
            self._num_coming -= rows.table.num_rows
            hand_over(rows)

        for claim, ranges in claims:
            read = self.job.source.batches(loaded.reader.columns, claim.parts, ranges)
            rows = read_prompts(read, loaded.reader, self.in_flight.making, keeps_text=keeps_text)
            rows = takewhile(lambda _: not is_over(), rows)  # do not read the rest of the window
            rows = row_keys(self.job, loaded.context).with_keys(rows)
            if self.reuse is not None:
                rows = self.reuse.without_found(rows, found)
            windows = plan_windows(
                rows,
                claim.parts,
                spec.engine.order_window,
                by_prefix=spec.engine.order == "prefix",
                by_length=spec.engine.order == "prefix" and not loaded.context.shares_prefixes,
                with_branch_points=loaded.context.slots_per_state > 0,
                is_starved=is_starved,
                before_next=read_ahead.wait,
            )
            # Do not loop over windows: the loop's variable would keep their rows in memory.
            yield from map(read_ahead.counted, map(self._tokens.pace.ordered, windows))


def _count(ranges: Sequence[range]) -> int:
    return sum(map(len, ranges))


def finish_row(job: Job, task: LoadedTask, result: RowResult) -> FinishedRow:
    """Return the output of a row that has run, or that could not run."""
    row = result.row
    if isinstance(row.prompt, RowError):
        return fail_row(job, row.row_id, row.prompt)
    try:
        return task.finish(row, result.completions)
    except RowError as error:  # the row's tokens cannot be decoded
        return fail_row(job, row.row_id, error)


def fail_row(job: Job, row_id: int, error: RowError) -> FinishedRow:
    """Return the output of a row that does not run."""
    return failed_row(row_id, error, TASKS[job.spec.task].failed_results)


def file_metadata(job: OutputJob) -> dict[str, str]:
    """Return the key-value metadata of every part: the settings that determine its content.

    The metadata holds neither times nor paths; for a model in a folder, it holds only the folder's
    name.
    """
    facts, model = job.manifest.job, job.spec.model
    template = json.dumps(facts["prompt"], sort_keys=True).encode()
    name = PurePath(model.name).name if PurePath(model.name).is_absolute() else model.name
    return {
        "batchinfer.model": name,
        "batchinfer.revision": model.revision or "",
        "batchinfer.sampling": json.dumps(facts["sampling"]),
        "batchinfer.template_hash": hashlib.sha256(template).hexdigest(),
        "batchinfer.versions": json.dumps(package_versions()),
        "batchinfer.fingerprint": job.manifest.fingerprint,
        **({EXPLODED: "true"} if job.spec.output.explode else {}),
    }
