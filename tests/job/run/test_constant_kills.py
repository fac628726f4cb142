"""A job makes progress even if each of its runs is killed soon after its start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchinfer.config import SamplingParams
from batchinfer.console.meter import Meter
from batchinfer.console.progress_bar import make_progress
from batchinfer.engine.request import Completion
from batchinfer.engine.step import Step, StepResult
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run.engine_loop import EngineLoop, TurnResult
from batchinfer.job.run.threads import Prefetcher
from batchinfer.job.tokens.in_flight import TokensInFlight, TokenUpdate
from batchinfer.job.tokens.token_files import TokenFiles
from batchinfer.requests.requests import PromptRow, RowSampling
from tests.engine.fake import make_engine, make_request
from tests.job.fakes import begin

NUM_ROWS = 24
OUTPUT_TOKENS = 40
PLAN = Manifest("f", {}, (), (), 1000, 100, "2026-11-20T10:00:00")

# A job of 33 seconds. Computing all prompts and outputs again would take 10 seconds.
START_S = 4.0
STEP_S = 0.12
DRAW_S = 0.025
PREFILL_S = 0.01


class Killed(BaseException):
    """Ends a run in the middle of a step."""


class Task:
    """Makes one request per row."""

    def requests(self, row: PromptRow) -> list[Any]:
        return [make_request(row.row_id, [row.row_id + 1, 2, 3], max_tokens=OUTPUT_TOKENS, n=1)]

    def follow_up_requests(self, row: PromptRow, completions: object) -> list[Any]:
        return []


@dataclass
class InterruptedJob:
    """Runs that are killed ``life_s`` simulated seconds after their start."""

    out: OutputDir
    life_s: float
    answers: dict[int, list[int]] = field(default_factory=dict)
    """Token ids of finished rows."""
    prefilled: int = 0
    """Number of tokens that steps computed without drawing them."""
    num_runs: int = 0

    def run(self) -> None:
        """Run once; return when all rows are finished, or raise ``Killed``."""
        self.num_runs += 1
        files = TokenFiles(self.out, PLAN, {}, f"run-{self.num_runs:05d}")
        missing = [row for row in range(NUM_ROWS) if row not in self.answers]
        kept, pace = files.recover([range(row, row + 1) for row in missing])
        now, unwritten = START_S, list[Completion]()
        progress = make_progress(Meter(NUM_ROWS), quiet=True)
        tokens = TokensInFlight(5.0, progress, kept, clock=lambda: now)
        if pace is not None:
            tokens.pace.follow(pace)

        def hand_over(update: TokenUpdate | TurnResult) -> None:
            nonlocal now
            if isinstance(update, TurnResult):
                unwritten.extend(done for row in update.rows for done in row.completions)
                if update.step is not None:
                    self.prefilled += update.step.prefill_tokens
                if now >= self.life_s:
                    raise Killed
            else:
                self._keep(unwritten)
                files.write(update)

        def run(step: Step) -> StepResult:
            nonlocal now
            num_new = np.diff(step.query_starts)
            now += STEP_S + PREFILL_S * num_new[num_new > 1].sum() + DRAW_S * (num_new == 1).sum()
            return compute(step)

        engine, runner = make_engine(
            4096,
            max_num_seqs=NUM_ROWS,
            max_tokens=512,
            next_token=never_ends,
            clock=lambda: now,
        )
        compute, runner.run = runner.run, run  # type: ignore[method-assign]
        with rows_of(tokens.pace.ordered([as_row(number) for number in missing])) as rows:
            loop = EngineLoop(
                *(engine, Task(), progress, Event()),  # type: ignore[arg-type]
                max_waiting=NUM_ROWS,
                admit=lambda row_ids: None,
                pace=tokens.pace,
            )
            with tokens.observing(engine, hand_over):
                assert loop.run(rows, hand_over)
        self._keep(unwritten)

    def recomputed(self) -> int:
        """Return the number of tokens that all runs computed again."""
        return self.prefilled - 3 * NUM_ROWS

    def _keep(self, finished: list[Completion]) -> None:
        self.answers |= {
            done.request.row_id: done.outputs[0].token_ids.tolist() for done in finished
        }
        finished.clear()


def never_ends(context: bytes, stream: int, sample: int, position: int) -> int:
    return 1 + (stream * 7 + position) % 999


def as_row(number: int) -> PromptRow:
    prompt: Any = SimpleNamespace(token_ids=np.array([number + 1, 2, 3], dtype=np.int32))
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, seed=0)
    return PromptRow(number, prompt, RowSampling(params, own_seed=False))


@contextmanager
def rows_of(rows: list[PromptRow]) -> Iterator[Prefetcher[list[PromptRow]]]:
    with Prefetcher([rows], depth=1) as prefetched:
        yield prefetched


@pytest.mark.parametrize(
    ("life_s", "most_runs", "most_recomputed"), [(20.0, 4, 0.7), (12.0, 12, 0.5)]
)
def test_a_job_ends_although_each_run_is_killed(
    tmp_path: Path, life_s: float, most_runs: int, most_recomputed: float
) -> None:
    """Killed after 20 seconds, the first run leaves 25 tokens of each row, so that at least 63 % of
    the drawn tokens must be computed again."""
    out = OutputDir(tmp_path / "out")
    begin(out, PLAN)
    job = InterruptedJob(out, life_s)
    while len(job.answers) < NUM_ROWS:
        with suppress(Killed):
            job.run()
        assert job.num_runs <= most_runs
    assert job.recomputed() < most_recomputed * NUM_ROWS * OUTPUT_TOKENS
    assert all(len(answer) == OUTPUT_TOKENS for answer in job.answers.values())
