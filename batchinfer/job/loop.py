"""The engine's loop: rows in as they are wanted, steps, finished rows out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from batchinfer.engine.engine import Engine
from batchinfer.engine.recovery import Recovered
from batchinfer.engine.request import Completion
from batchinfer.engine.stats import StepStats
from batchinfer.errors import RowError
from batchinfer.job.failpoints import failpoint
from batchinfer.job.order import PromptRow
from batchinfer.job.progress import Progress
from batchinfer.job.rows import RequestMaker
from batchinfer.job.threads import Ahead, Behind
from batchinfer.text.prompts import Prompt

_WAIT_S = 0.1  # for rows, before looking whether to stop


@dataclass(frozen=True, slots=True)
class Finished:
    """What one turn of the loop hands to the writing thread."""

    rows: list[tuple[PromptRow, Completion | None]]
    step: StepStats | None
    recovered: Recovered | None = None


@dataclass
class EngineLoop:
    """Keeps the engine fed until every row is finished."""

    engine: Engine
    requests: RequestMaker
    progress: Progress
    stop: Event
    max_waiting: int
    """Rows queued in the engine, so that it can look ahead; the others wait outside it."""
    admit: Callable[[list[int]], None]
    """Told which rows are about to be given to the engine."""

    def __post_init__(self) -> None:
        self._in_flight: dict[int, PromptRow] = {}

    def run(self, rows: Ahead[list[PromptRow]], writer: Behind[Finished]) -> bool:
        """Run ``rows`` until they are all finished, or until asked to stop.

        Returns:
            Whether all rows are finished and handed to ``writer``.
        """
        complete = False
        while not complete and not self.stop.is_set():
            failed = self._feed(rows)
            if self.engine.num_unfinished or failed:
                writer.put(self._step(failed))
            else:
                # In this order: a stop is what may have ended the rows.
                complete = rows.exhausted and not self.stop.is_set()
        return complete

    def _feed(self, rows: Ahead[list[PromptRow]]) -> list[PromptRow]:
        """Queue rows in the engine; give back those that cannot run."""
        failed: list[PromptRow] = []
        while self.engine.num_waiting < self.max_waiting:
            idle = not self.engine.num_unfinished and not failed
            batch = rows.take(_WAIT_S if idle else 0)
            if batch is None:
                break
            failed += [row for row in batch if isinstance(row.prompt, RowError)]
            self._give([row for row in batch if not isinstance(row.prompt, RowError)])
        return failed

    def _give(self, rows: list[PromptRow]) -> None:
        self.admit([row.row_id for row in rows])
        for row in rows:
            failpoint(f"row-{row.row_id}")
            assert isinstance(row.prompt, Prompt)
            assert row.sampling is not None
            self._in_flight[row.row_id] = row
            facts = row.row_id, row.prompt, row.sampling, row.shared_later, row.adapter
            request = self.requests.make(*facts)
            self.engine.add_request(request)

    def _step(self, failed: list[PromptRow]) -> Finished:
        done: list[tuple[PromptRow, Completion | None]] = [(row, None) for row in failed]
        if not self.engine.num_unfinished:
            self.progress.update(len(done), 0, None)
            return Finished(done, None)
        outcome = self.engine.step()
        done += [(self._in_flight.pop(c.request.row_id), c) for c in outcome.completions]
        tokens = sum(completion.stats.output_tokens for completion in outcome.completions)
        self.progress.update(len(done), tokens, outcome.stats)
        return Finished(done, outcome.stats, outcome.recovered)
