"""Races in the engine's loop that whole jobs cannot reproduce."""

from __future__ import annotations

from threading import Event

from batchinfer.console.meter import Meter
from batchinfer.console.progress_bar import make_progress
from batchinfer.job.rows.finished_row import RowFinisher
from batchinfer.job.rows.generate import Generation
from batchinfer.job.run.engine_loop import EngineLoop, TurnResult
from batchinfer.job.run.threads import BackgroundConsumer, Prefetcher
from batchinfer.job.tokens.resume_pace import ResumePace
from batchinfer.requests.requests import PromptRow, RequestMaker
from tests.job.fakes import FakeBuild, grammars


class StoppedWhileReading(Prefetcher[list[PromptRow]]):
    """Sets ``stop`` while the loop waits for rows."""

    def __init__(self, stop: Event) -> None:
        super().__init__([], depth=1)
        self._stop = stop

    def take(self, timeout_s: float) -> list[PromptRow] | None:
        self._stop.set()
        return None


def test_loop_stopped_while_reading_is_incomplete() -> None:
    stop = Event()
    built = FakeBuild()(None, None, log=lambda line: None)
    task = Generation(
        RequestMaker(built.tokenizer, built.eos_token_ids, grammars()),
        RowFinisher(built.tokenizer, ()),
    )
    loop = EngineLoop(
        built.engine,
        task,
        make_progress(Meter(25), quiet=True),
        stop,
        max_waiting=4,
        admit=lambda row_ids: None,
        pace=ResumePace(lambda row_id: 0, lambda: 0.0),
    )
    written: list[TurnResult] = []
    with StoppedWhileReading(stop) as rows, BackgroundConsumer(written.append, depth=1) as writer:
        while not rows.exhausted:  # wait until the thread has ended
            pass
        assert not loop.run(rows, writer.put)
