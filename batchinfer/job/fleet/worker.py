"""A worker of a fleet: one engine, fed by leases as they come.

    reads        read_prompts -> plan_windows     Prefetcher, lease after lease
                       | PromptRow                what was given back is left out here
    runs         EngineLoop.run                   the thread that called run
                       | TurnResult
    writes       LeaseRun.add, give_back          BackgroundConsumer

The engine never knows where a lease ends: rows of the next come while the last ones of the one
before still run. What is told to the driver is collected until it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock

from batchinfer.errors import JobError, StorageError, UsageError
from batchinfer.job.fleet.files.outbox import Outbox
from batchinfer.job.fleet.lease_run import LeaseRun
from batchinfer.job.fleet.messages import Assignment, Failure
from batchinfer.job.fleet.worker_reports import WorkerReports
from batchinfer.job.job import LoadedJob, OutputJob, row_keys
from batchinfer.job.reuse.reuse import FoundRows, RowReuse, open_outputs
from batchinfer.job.row_ids import RowIds
from batchinfer.job.rows.reader import read_prompts
from batchinfer.job.rows.window import plan_windows
from batchinfer.job.run.engine_loop import EngineLoop, TurnResult
from batchinfer.job.run.in_flight_log import InFlightLog
from batchinfer.job.run.pipeline import QUARANTINED, fail_row, file_metadata, finish_row
from batchinfer.job.run.threads import BackgroundConsumer, Prefetcher
from batchinfer.job.stats.recorder import Recorder
from batchinfer.job.storage.filesystem import storage_errors
from batchinfer.job.tokens.in_flight import TokensInFlight, TokenUpdate
from batchinfer.job.tokens.token_files import TokenFiles
from batchinfer.process.process import gc_frozen
from batchinfer.requests.requests import PromptRow

_WRITES_DUE = 64
_POLL_S = 0.1

_Write = TurnResult | TokenUpdate | Callable[[], None]
_Planned = tuple[LeaseRun, list[PromptRow]]


class FleetWorker:
    """One engine's way through the leases it is given.

    Args:
        job: the job; its ``out`` is this worker's own view of the directory.
        run_id: its id, which the driver has handed out.
        outbox: takes what is to be told.
    """

    def __init__(self, job: OutputJob, loaded: LoadedJob, run_id: str, outbox: Outbox) -> None:
        self._reports = WorkerReports(outbox, self._num_unadmitted)
        self._job = job
        self._loaded = loaded
        self._run_id = run_id
        self._metadata = file_metadata(job)
        self._assignments: SimpleQueue[Assignment] = SimpleQueue()
        self._leases: tuple[LeaseRun, ...] = ()
        """Replaced, never changed: two threads do that, under the lock, and all look."""
        self._leases_lock = Lock()
        self._admitted: dict[int, LeaseRun] = {}
        """The lease under which a row runs: it may have been of another before."""
        self._tokens_read: set[str] = set()
        """Names of the files of tokens that have been read."""
        self._writer: BackgroundConsumer[_Write] | None = None
        self._reuse: RowReuse | None = None
        self._stop = Event()
        self._woken = Event()
        """Set when there is a lease, or nothing to wait for any more."""

    def give(self, assignment: Assignment) -> None:
        """Take a lease."""
        self._assignments.put(assignment)
        self._woken.set()

    def take_back(self, *, everything: bool) -> None:
        """Give rows back that the engine has not got: half of them, or all."""
        if self._writer is None:  # it has not taken up the first lease yet
            self._reports.gave_back(())
        else:
            self._writer.put(partial(self._answer, everything))

    def stop(self) -> None:
        """Stop after the running step, and put everything on disk."""
        self._stop.set()
        self._woken.set()

    def run(self) -> None:
        """Run leases until stopped; the last report says how it ended."""
        self._woken.wait()
        # Who never has a lease writes nothing: what is overwritten goes before the first.
        try:
            self._recorder = self._begun_recorder()
            self._reuse = self._opened_reuse()
            with InFlightLog(self._job.out, self._run_id) as in_flight:
                self._run(in_flight)
        except JobError as error:
            self._reports.is_over(Failure(type(error).__name__, str(error)))
        except BaseException as error:
            self._reports.is_over(Failure("", repr(error)))
            raise
        else:
            self._reports.is_over(None)

    def _begun_recorder(self) -> Recorder:
        out = self._job.out
        with storage_errors(out.staging):
            out.files.make_directory(out.staging)
        recorder = Recorder(out, self._job.spec, self._run_id)
        recorder.loaded(self._loaded.context, self._loaded.seconds, self._loaded.phases)
        for line in self._loaded.log:
            recorder.log(line)
        return recorder

    def _opened_reuse(self) -> RowReuse | None:
        """What finds rows in other outputs, as far as this machine sees these."""
        outputs, log = [], self._recorder.log
        for path in self._job.spec.output.reuse:
            try:
                outputs += open_outputs([path], self._job.out)
            except (UsageError, StorageError) as error:
                log(f"output.reuse: nothing of {path} is reused by this worker: {error}")
        return RowReuse(outputs, self._job.table.generated_schema, log) if outputs else None

    def _run(self, in_flight: InFlightLog) -> None:
        spec, context = self._job.spec, self._loaded.context
        starved = Event()
        self._token_files = TokenFiles(
            self._job.out, self._job.manifest, context.adapters, self._run_id
        )
        self._tokens = TokensInFlight(self._job.out.files.flush_every_s, self._reports, {})
        loop = EngineLoop(
            context.engine,
            self._loaded.task,
            self._reports,
            self._stop,
            # Nobody can take back what the engine has: half of what runs is queued, not twice it.
            max_waiting=max(1, spec.engine.max_num_seqs // 2),
            admit=in_flight.note,
        )
        try:
            with (
                BackgroundConsumer(self._write, _WRITES_DUE) as writer,
                Prefetcher(
                    self._batches(writer, in_flight, starved),
                    1,
                    starved,
                ) as rows,
            ):
                self._writer = writer
                try:
                    with gc_frozen():
                        most = max(1, spec.engine.max_num_seqs // 4)
                        with self._tokens.observing(context.engine, writer.put):
                            loop.run(_Admission(rows, self.admit, most), writer.put)
                finally:
                    self._stop.set()
                    self._loaded.processes.stop()
        finally:
            self._flush_all()

    def _flush_all(self) -> None:
        """Whatever ends the worker, the rows it has finished are on disk afterwards."""
        with suppress(JobError):
            for lease in self._leases:
                lease.flush()
            self._recorder.end()

    def _batches(
        self, writer: BackgroundConsumer[_Write], in_flight: InFlightLog, starved: Event
    ) -> Iterator[_Planned]:
        """Rows of one lease after the other, in the order they should run, until stopped."""
        while not self._stop.is_set():
            try:
                assignment = self._assignments.get(timeout=_POLL_S)
            except Empty:
                continue
            lease = self._lease_run(assignment)
            with self._leases_lock:
                self._leases = (*self._leases, lease)
            writer.put(partial(self._begin, lease))
            if lease.num_unadmitted:
                for batch in self._planned(lease, in_flight, starved, writer.put):
                    yield lease, batch

    def _lease_run(self, assignment: Assignment) -> LeaseRun:
        new = set(assignment.tokens) - self._tokens_read
        self._tokens_read |= new
        self._tokens.add(self._token_files.read(new))
        self._tokens.is_row_alone = assignment.lease.num_rows == 1
        return LeaseRun(
            self._job,
            assignment,
            self._metadata,
            self._recorder.checkpoint,
            self._reports.staged,
            self._reports.wrote,
        )

    def _planned(
        self,
        lease: LeaseRun,
        in_flight: InFlightLog,
        starved: Event,
        put: Callable[[Callable[[], None]], None],
    ) -> Iterator[list[PromptRow]]:
        spec = self._job.spec
        reader = self._loaded.reader
        read = self._job.source.batches(reader.columns, lease.parts, lease.ranges)
        keeps_text = "prompt" in spec.output.include
        rows = read_prompts(read, reader, in_flight.making, keeps_text=keeps_text)
        rows = self._while_needed(rows, lease)
        rows = row_keys(self._job, self._loaded.context).with_keys(rows)
        if self._reuse is not None:
            rows = self._reuse.without_found(
                rows, lambda found: put(partial(self._copy, lease, found)), lease.admit
            )
        return plan_windows(
            rows,
            lease.parts,
            spec.engine.order_window,
            by_prefix=spec.engine.order == "prefix",
            by_length=spec.engine.order == "prefix" and not self._loaded.context.shares_prefixes,
            is_starved=starved.is_set,
        )

    def _copy(self, lease: LeaseRun, found: FoundRows) -> None:
        """Write rows whose answers another output holds, unless asked to stop."""
        assert self._reuse is not None
        for table in self._reuse.copied(found):
            if self._stop.is_set():
                return
            lease.add_table(table)
            self._reports.reuse(table.num_rows)
        self._reports.admitted()
        self._end_finished()

    def _while_needed(
        self, batches: Iterator[list[PromptRow]], lease: LeaseRun
    ) -> Iterator[list[PromptRow]]:
        """Rows until the worker stops, or has given back all that follow."""
        for batch in batches:
            if self._stop.is_set() or not lease.has_unadmitted_from(batch[0].row_id):
                return
            yield batch

    def _begin(self, lease: LeaseRun) -> None:
        lease.begin(lambda row_id: fail_row(self._job, row_id, QUARANTINED))
        self._reports.took(lease.fence)
        self._end_finished()

    def _write(self, item: _Write) -> None:
        if isinstance(item, TokenUpdate):
            for lease in self._leases:
                lease.flush()
            self._token_files.write(item)
            return
        if not isinstance(item, TurnResult):
            item()
            return
        self._recorder.add(item.step, len(item.rows))
        if item.recovered is not None:
            self._recorder.note_recovery(item.recovered)
        for result in item.rows:
            lease = self._admitted.pop(result.row.row_id)
            row = finish_row(self._job, self._loaded.task, result)
            lease.add(row)
            if row.has_failed:
                self._reports.fail(1)
        for lease in self._leases:
            lease.flush_if_due()
        self._end_finished()

    def _end_finished(self) -> None:
        """Tell of leases that lack no row; their rows are put on disk before."""
        for lease in [lease for lease in self._leases if lease.is_done]:
            lease.flush()
            with self._leases_lock:
                self._leases = tuple(other for other in self._leases if other is not lease)
            self._reports.ended(lease.fence)

    def _answer(self, everything: bool) -> None:
        """Give back rows that the engine has not got: all, or half of them."""
        left = self._num_unadmitted()
        left = left if everything else left // 2
        answer: list[tuple[int, RowIds]] = []
        for lease in reversed(self._leases):
            rows = lease.give_back(left)
            if len(rows):
                left -= len(rows)
                answer.append((lease.fence, rows))
        self._reports.gave_back(answer)
        self._end_finished()

    def _num_unadmitted(self) -> int:
        return sum(lease.num_unadmitted for lease in self._leases)

    def admit(self, lease: LeaseRun, rows: list[PromptRow]) -> list[PromptRow]:
        """Those of a lease's rows that have not been given back; in the engine's thread."""
        kept = lease.admit(rows)
        self._admitted.update((row.row_id, lease) for row in kept)
        self._reports.admitted()
        return kept


class _Admission:
    """Rows on their way to the engine, few at a time, without those that were given back."""

    def __init__(
        self,
        rows: Prefetcher[tuple[LeaseRun, list[PromptRow]]],
        admit: Callable[[LeaseRun, list[PromptRow]], list[PromptRow]],
        most: int,
    ) -> None:
        self._rows = rows
        self._admit = admit
        self._most = most
        self._lease: LeaseRun | None = None
        self._next: list[PromptRow] = []

    def take(self, timeout_s: float) -> list[PromptRow] | None:
        """The next rows; None if there are none within the time."""
        if not self._next:
            found = self._rows.take(timeout_s)
            if found is None:
                return None
            self._lease, self._next = found
        assert self._lease is not None
        taken, self._next = self._next[: self._most], self._next[self._most :]
        return self._admit(self._lease, taken)

    @property
    def exhausted(self) -> bool:
        """Whether no more rows will come."""
        return not self._next and self._rows.exhausted
