"""Jobs killed before a flush is due: only rows that kill the process end as errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.run import pipeline
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.tokens.in_flight import TokensInFlight
from tests.job.datasets import write_parquet
from tests.job.fakes import AtOnce, FakeBuild, drawn_at_length, job

STEP_S = 0.1
MOST_TOKENS = 30


class Killed(BaseException):
    """An exception that the program never catches."""


class SlowBuild(FakeBuild):
    """Builds engines with a simulated clock; each step takes time, and a step can be killed."""

    def __init__(self) -> None:
        super().__init__(next_token=self._next_token)
        self.now = 0.0
        self.most_steps = 1_000_000
        self.poison: tuple[int, int] | None = None
        """A row id and the position of the token at which this row kills the run."""
        self.before_step = self._before_step

    def _before_step(self, step: int) -> None:
        self.now += STEP_S
        if step >= self.most_steps:
            raise Killed

    def _next_token(self, context: bytes, stream: int, sample: int, position: int) -> int:
        if (stream, position) == self.poison:
            raise Killed
        return drawn_at_length(context, stream, sample, position)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> SlowBuild:
    """Run jobs on the simulated clock, with the real interval of five seconds between flushes."""
    build = SlowBuild()
    timed = partial(TokensInFlight, clock=lambda: build.now)
    monkeypatch.setattr(pipeline, "TokensInFlight", timed)
    monkeypatch.setattr(pipeline, "BackgroundConsumer", AtOnce)
    return build


def long_job(folder: Path, num_rows: int, max_tokens: int = MOST_TOKENS) -> JobSpec:
    prompts = [f"{row} asks" for row in range(num_rows)]
    write_parquet(folder / "in" / "x.parquet", {"prompt": prompts})
    sampling = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "max_tokens": max_tokens}
    return job(folder, sampling=sampling, errors={"max_error_rate": 1.0})


def errors_of(folder: Path) -> dict[int, str]:
    table = pq.read_table(sorted((folder / "out" / "data").iterdir()))
    return {row["row_id"]: row["error"]["code"] for row in table.to_pylist() if row["error"]}


def kills_until_done(run: Callable[[], ExitCode], most: int) -> int:
    for kills in range(most):
        try:
            assert run() is ExitCode.OK
        except Killed:
            continue
        return kills
    raise AssertionError(f"still dies after {most} runs")


def test_rows_of_externally_killed_runs_are_not_given_up(tmp_path: Path, build: SlowBuild) -> None:
    """Runs may die early, as long as each lives for a second after its first token.

    The job has two rows, because a single row would finish before enough runs have died.
    """
    spec = long_job(tmp_path, num_rows=2, max_tokens=80)
    build.most_steps = 14
    kills = kills_until_done(lambda: run_job(spec, build=build, quiet=True), 100)
    assert kills >= 2 + 1 + 2, "two deaths together, one in halves, two alone would condemn a row"
    assert errors_of(tmp_path) == {}


@pytest.mark.parametrize(
    ("num_rows", "num_tokens"),
    [
        (1, 12),
        pytest.param(1, 0, marks=pytest.mark.long),
        pytest.param(1, 11, marks=pytest.mark.long),
        pytest.param(1, 29, marks=pytest.mark.long),
        pytest.param(4, 12, marks=pytest.mark.long),
    ],
)
def test_row_that_kills_after_some_tokens_is_given_up(
    tmp_path: Path, build: SlowBuild, num_rows: int, num_tokens: int
) -> None:
    spec = long_job(tmp_path, num_rows)
    build.poison = (0, num_tokens)
    kills = kills_until_done(lambda: run_job(spec, build=build, quiet=True), 100)
    assert kills <= 2 + 2 + 2 + 1, "two deaths together, two in halves, two alone, one more"
    assert errors_of(tmp_path) == {0: "crashed_engine"}
