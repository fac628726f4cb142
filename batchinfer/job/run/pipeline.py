"""The way of a row: source, prompt, order, engine, text, sink."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from threading import Event

from batchinfer.console.progress import Progress
from batchinfer.errors import JobError, RowError
from batchinfer.job.input.format import BATCH_ROWS
from batchinfer.job.job import Job, Loaded
from batchinfer.job.output.explode import METADATA as EXPLODED
from batchinfer.job.output.part_writer import Sink
from batchinfer.job.output.quarantine import FlightLog
from batchinfer.job.output.resume import Left
from batchinfer.job.rows.dedup import Twins
from batchinfer.job.rows.generate import failed_row
from batchinfer.job.rows.prompt_row import prompt_rows, without_text
from batchinfer.job.rows.token_store import TokenStore
from batchinfer.job.rows.window import Lot, planned
from batchinfer.job.run.engine_loop import EngineLoop, Finished
from batchinfer.job.run.threads import Ahead, Behind
from batchinfer.job.stats.recorder import Recorder, package_versions
from batchinfer.process import long_lived_left_alone

_WRITES_DUE = 64  # turns of the engine's loop that the writing thread may be behind
_LOTS_READ_BACK = 2
_GIVEN_UP = RowError("crashed_engine", "the process died twice while this row ran alone")


def make_parts(
    job: Job, left: Left, loaded: Loaded | None, progress: Progress, stop: Event
) -> bool:
    """Make the parts that are left.

    Rows are read, made into prompts and planned in one thread, read back in another, run in this
    one, made into text and written in a fourth.

    Args:
        job: the job.
        left: what to make and what is there of it already.
        loaded: its model; None where no row has to run.
        progress: told about finished rows.
        stop: when set, the running step is the last.

    Returns:
        Whether all parts were made.

    Raises:
        JobError: data cannot be read, the model cannot be run, or a part cannot be written;
            finished rows are kept.
    """
    recorder = Recorder(job.out, job.spec)
    sink = Sink(
        job.out,
        left.parts,
        left.segments,
        left.finished,
        job.table,
        job.source,
        _file_metadata(job),
        recorder.checkpoint,
    )
    with _kept(recorder, sink):
        sink.write_complete()  # parts that lack no row, like that of an empty dataset
        for row_id in left.suspicion.given_up:
            sink.add(failed_row(row_id, _GIVEN_UP))
        if loaded is None:
            return True
        recorder.loaded(loaded.built, loaded.seconds)
        for line in loaded.log:
            recorder.log(line)
        at_once = left.suspicion.is_held
        with FlightLog(job.out, recorder.run.run_id, at_once=at_once) as flight:
            phase = _Phase(job, left, loaded, recorder, sink, flight, progress, stop)
            for ranges in left.phases():
                if not phase.run(ranges):
                    return False
                sink.flush()  # before the next: whose death it is must be beyond doubt
    return True


@contextmanager
def _kept(recorder: Recorder, sink: Sink) -> Iterator[None]:
    """Whatever ends the run, the rows it has finished are on disk afterwards."""
    try:
        yield
    except BaseException:
        with suppress(JobError):
            sink.flush()
            recorder.end()
        raise
    sink.flush()
    recorder.end()


@dataclass(frozen=True)
class _Phase:
    """Runs rows with nothing beside them."""

    job: Job
    left: Left
    loaded: Loaded
    recorder: Recorder
    sink: Sink
    flight: FlightLog
    progress: Progress
    stop: Event

    def run(self, ranges: Sequence[range]) -> bool:
        """Run the rows in ``ranges``; whether they are all finished."""
        spec, built, task = self.job.spec, self.loaded.built, self.loaded.task
        leaving, wanted = Event(), Event()
        lots = self._lots(ranges, lambda: self.stop.is_set() or leaving.is_set(), wanted.is_set)
        loop = EngineLoop(
            built.engine,
            task.requests,
            task.further,
            self.progress,
            self.stop,
            max_waiting=2 * spec.engine.max_num_seqs,
            admit=self.flight.note,
            twins=Twins(),
        )

        def write(finished: Finished) -> None:
            self.recorder.add(finished.step, len(finished.rows))
            if finished.recovered is not None:
                self.recorder.note_recovery(finished.recovered)
            for row, completions in finished.rows:
                self.sink.add(task.finish(row, completions))
            self.sink.flush_if_due()

        window_lots = max(1, spec.engine.order_window // BATCH_ROWS)  # the next one is then read
        with (
            Ahead(lots, window_lots, wanted) as lots_ahead,
            Ahead((lot.prompt_rows() for lot in lots_ahead), _LOTS_READ_BACK) as rows,
            Behind(write, _WRITES_DUE) as writer,
        ):
            try:
                with long_lived_left_alone():
                    return loop.run(rows, writer)
            finally:
                leaving.set()

    def _lots(
        self, ranges: Sequence[range], is_over: Callable[[], bool], is_hungry: Callable[[], bool]
    ) -> Iterator[Lot]:
        """The rows in ``ranges``, in the order they should run, until ``is_over``."""
        spec, parts, loaded = self.job.spec, self.left.parts, self.loaded
        rows = prompt_rows(self.job.source, parts, loaded.reader, ranges, self.flight.making)
        rows = takewhile(lambda _: not is_over(), rows)  # here: a window takes a while to collect
        if "prompt" not in spec.output.include:
            rows = without_text(rows)
        return planned(
            rows,
            parts,
            spec.engine.order_window,
            by_prefix=spec.engine.order == "prefix",
            make_store=partial(TokenStore, self.job.out.scratch),
            is_hungry=is_hungry,
        )


def _file_metadata(job: Job) -> dict[str, str]:
    """Key-value metadata of every part: what made it, nothing of when or where."""
    facts, model = job.manifest.job, job.spec.model
    template = json.dumps(facts["prompt"], sort_keys=True).encode()
    return {
        "batchinfer.model": model.name,
        "batchinfer.revision": model.revision or "",
        "batchinfer.sampling": json.dumps(facts["sampling"]),
        "batchinfer.template_hash": hashlib.sha256(template).hexdigest(),
        "batchinfer.versions": json.dumps(package_versions()),
        "batchinfer.fingerprint": job.manifest.fingerprint,
        **({EXPLODED: "true"} if job.spec.output.explode else {}),
    }
