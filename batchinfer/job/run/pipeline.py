"""The way of a row through the three threads of a run.

    reads        read_prompts -> plan_windows     Prefetcher, a window ahead
                       | PromptRow
    runs         EngineLoop.run                   the thread that called run_pipeline
                       | TurnResult
    writes       LoadedTask.finish -> PartWriter  BackgroundConsumer, at most 64 turns behind
                 tokens so far -> TokenFiles      every few seconds

From the file it is read from to the part it is written to, a row is in turn a ``Row`` of values, a
``PromptRow``, a ``Request``, a ``RequestState`` with its sequences, a ``Completion``, a
``RowResult`` and a ``FinishedRow``.

Bounded queues lie between them: whoever is too fast waits. Two windows are in memory: the one whose
rows run, and the one after it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import PurePath
from threading import Event

from batchinfer.console.meter import Counts
from batchinfer.console.phases import phase
from batchinfer.console.progress import Progress
from batchinfer.errors import JobError, RowError
from batchinfer.job.job import Job, LoadedJob, OutputJob, row_keys
from batchinfer.job.output.commit import publish
from batchinfer.job.output.explode import METADATA as EXPLODED
from batchinfer.job.output.part_writer import PartWriter
from batchinfer.job.output.recovery.recovered_rows import RecoveredRows
from batchinfer.job.reuse.reuse import FoundRows, RowReuse
from batchinfer.job.rows.finished_row import FinishedRow, failed_row
from batchinfer.job.rows.reader import read_prompts
from batchinfer.job.rows.task import LoadedTask
from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.rows.window import plan_windows
from batchinfer.job.run.engine_loop import EngineLoop, RowResult, TurnResult
from batchinfer.job.run.in_flight_log import InFlightLog
from batchinfer.job.run.threads import BackgroundConsumer, Prefetcher
from batchinfer.job.stats.recorder import Recorder, next_run_id, package_versions
from batchinfer.job.tokens.in_flight import TokensInFlight, TokenUpdate
from batchinfer.job.tokens.token_files import TokenFiles
from batchinfer.process.process import gc_frozen
from batchinfer.requests.requests import PromptRow

_WRITES_DUE = 64  # turns of the engine's loop that the writing thread may be behind
QUARANTINED = RowError("crashed_engine", "the process died twice while this row ran alone")
"""The error of a row that is given up."""


def run_pipeline(
    job: OutputJob,
    recovered: RecoveredRows,
    loaded: LoadedJob | None,
    progress: Progress,
    stop: Event,
    reuse: RowReuse | None = None,
) -> bool:
    """Make the parts that are not finished.

    Rows are read, made into prompts and planned in one thread, run in this one, made into text and
    written in a third.

    Args:
        recovered: the parts to make, and what is there of them already.
        loaded: its model; None where no row has to run.
        progress: shows finished rows.
        stop: when set, the running step is the last.
        reuse: finds rows that need not run, because another output holds them.

    Returns:
        Whether all parts were made.

    Raises:
        JobError: data cannot be read, the model cannot be run, or a part cannot be written;
            finished rows are kept.
    """
    recorder = Recorder(job.out, job.spec, next_run_id(job.out))
    part_writer = PartWriter(
        job.out,
        recovered.parts,
        recovered.segments,
        recovered.finished,
        job.table,
        job.source,
        file_metadata(job),
        recorder.checkpoint,
        partial(publish, job.out),
    )
    with flush_on_exit(recorder, part_writer):
        part_writer.write_complete()  # parts that lack no row, like that of an empty dataset
        for row_id in recovered.crash_history.given_up:
            part_writer.add(fail_row(job, row_id, QUARANTINED))
            progress.update(Counts(rows=1), None)
            progress.fail(1)
        if loaded is None:
            return True
        recorder.loaded(loaded.context, loaded.seconds)
        for line in loaded.log:
            recorder.log(line)
        token_files = TokenFiles(
            job.out, job.manifest, loaded.context.adapters, recorder.run.run_id
        )
        kept = token_files.recover(recovered.missing)
        tokens = TokensInFlight(job.out.files.flush_every_s, progress, kept)
        at_once = recovered.crash_history.is_held
        with InFlightLog(job.out, recorder.run.run_id, at_once=at_once) as in_flight:
            rows = RowPipeline(
                *(job, recovered, loaded, recorder, part_writer),
                *(tokens, token_files, in_flight, progress, stop),
                reuse,
            )
            for ranges in recovered.phases():
                if not rows.run(ranges):
                    return False
                part_writer.flush()  # before the next: whose death it is must be beyond doubt
    return True


@contextmanager
def flush_on_exit(recorder: Recorder, part_writer: PartWriter) -> Iterator[None]:
    """Whatever ends the run, the rows it has finished are on disk afterwards."""
    try:
        yield
    except BaseException as error:
        with suppress(JobError):
            part_writer.flush()
        with suppress(JobError):  # a full disk may still have room for why the run failed
            recorder.end(error)
        raise
    part_writer.flush()
    recorder.end()


@dataclass(frozen=True)
class RowPipeline:
    """Runs rows with nothing beside them."""

    job: OutputJob
    recovered: RecoveredRows
    loaded: LoadedJob
    recorder: Recorder
    part_writer: PartWriter
    tokens: TokensInFlight
    token_files: TokenFiles
    in_flight: InFlightLog
    progress: Progress
    stop: Event
    reuse: RowReuse | None

    def run(self, ranges: Sequence[range]) -> bool:
        """Run the rows in ``ranges``; whether they are all finished."""
        spec, context, task = self.job.spec, self.loaded.context, self.loaded.task
        ending, starved, cut_short = Event(), Event(), Event()
        self.tokens.is_row_alone = sum(map(len, ranges)) == 1
        loop = EngineLoop(
            context.engine,
            task,
            self.progress,
            self.stop,
            max_waiting=2 * spec.engine.max_num_seqs,
            admit=self.in_flight.note,
        )

        def write(finished: TurnResult | FoundRows | TokenUpdate) -> None:
            if isinstance(finished, FoundRows):
                if not self._copy(finished):
                    cut_short.set()
                return
            if isinstance(finished, TokenUpdate):
                self.part_writer.flush()  # first: what it replaces may be of finished rows
                self.token_files.write(finished)
                return
            self.recorder.add(finished.step, len(finished.rows))
            if finished.recovered is not None:
                self.recorder.note_recovery(finished.recovered)
            for result in finished.rows:
                row = finish_row(self.job, task, result)
                self.part_writer.add(row)
                if row.has_failed:
                    self.progress.fail(1)
            self.part_writer.flush_if_due()

        complete = False
        with (
            BackgroundConsumer(write, _WRITES_DUE) as writer,
            Prefetcher(
                self._batches(
                    ranges,
                    lambda: self.stop.is_set() or ending.is_set(),
                    starved.is_set,
                    writer.put,
                ),
                1,
                starved,
            ) as rows,
        ):
            try:
                with gc_frozen():
                    with phase("reading and planning rows"):
                        rows.wait(self.stop)
                    with self.tokens.observing(context.engine, writer.put):
                        complete = loop.run(rows, writer.put)
            finally:
                ending.set()
                if not complete:
                    self.loaded.processes.stop()  # what they are at may take long
        return complete and not cut_short.is_set()

    def _copy(self, found: FoundRows) -> bool:
        """Write rows whose answers another output holds, unless asked to stop: whether all are."""
        assert self.reuse is not None
        for table in self.reuse.copied(found):
            if self.stop.is_set():
                return False
            self.part_writer.add_table(table)
            self.part_writer.flush_if_due()
            self.progress.reuse(table.num_rows)
        return True

    def _batches(
        self,
        ranges: Sequence[range],
        is_over: Callable[[], bool],
        is_starved: Callable[[], bool],
        hand_over: Callable[[FoundRows], None],
    ) -> Iterator[list[PromptRow]]:
        """The rows in ``ranges`` that have to run, in the order they should, until ``is_over``.

        Args:
            hand_over: takes those that need not.
        """
        spec, parts, loaded = self.job.spec, self.recovered.parts, self.loaded
        read = self.job.source.batches(loaded.reader.columns, parts, ranges)
        keeps_text = "prompt" in spec.output.include
        rows = read_prompts(read, loaded.reader, self.in_flight.making, keeps_text=keeps_text)
        rows = takewhile(lambda _: not is_over(), rows)  # here: a window takes a while to collect
        rows = row_keys(self.job, loaded.context).with_keys(rows)
        if self.reuse is not None:
            rows = self.reuse.without_found(rows, hand_over)
        return plan_windows(
            rows,
            parts,
            spec.engine.order_window,
            by_prefix=spec.engine.order == "prefix",
            by_length=spec.engine.order == "prefix" and not loaded.context.shares_prefixes,
            is_starved=is_starved,
        )


def finish_row(job: Job, task: LoadedTask, result: RowResult) -> FinishedRow:
    """The output of a row that has run, or that could not."""
    row = result.row
    if isinstance(row.prompt, RowError):
        return fail_row(job, row.row_id, row.prompt)
    try:
        return task.finish(row, result.completions)
    except RowError as error:  # its output cannot be decoded
        return fail_row(job, row.row_id, error)


def fail_row(job: Job, row_id: int, error: RowError) -> FinishedRow:
    """The output of a row that the engine does not run."""
    return failed_row(row_id, error, TASKS[job.spec.task].failed_results)


def file_metadata(job: OutputJob) -> dict[str, str]:
    """Key-value metadata of every part: what made it, nothing of when or where.

    A model in a folder has the folder's name: where that is may be another place tomorrow.
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
