"""Jobs whose rows share prefixes: how much is reused, and when rows reach the engine."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.rows.row_order import plan_windows
from batchinfer.job.run import pipeline
from batchinfer.job.run.read_ahead import ReadAhead
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.requests.requests import PromptRow
from batchinfer.text.processes.pool import WorkerPrompts
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, FakeBuilt, job
from tests.job.shared_rows import BLOCK_SIZE, OUTPUT_TOKENS, DrawingBuild, write_shared_rows

_LONG_S = 60.0


def shared_job(tmp_path: Path, order: str) -> JobSpec:
    return job(
        tmp_path,
        prompt={"column": None, "token_ids_column": "ids", "chat_template": "auto"},
        sampling={"max_tokens": OUTPUT_TOKENS, "ignore_eos": True},
        engine={"order": order},
        output={"rows_per_part": 4096},
    )


def summary(tmp_path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    return data


@pytest.mark.parametrize(
    ("num_rows", "order", "least", "most"),
    [(4_500, "prefix", 0.99, 1.0), (2_000, "input", 0.3, 0.95)],
)
def test_prefix_sharing_is_close_to_the_optimum(
    tmp_path: Path, num_rows: int, order: str, least: float, most: float
) -> None:
    """Prefixes have three levels and end within blocks; the pool holds a tenth of all rows."""
    possible = write_shared_rows(tmp_path / "in" / "x.parquet", num_rows)
    need = (possible + num_rows * OUTPUT_TOKENS) // BLOCK_SIZE
    spec = shared_job(tmp_path, order)
    assert run_job(spec, quiet=True, build=DrawingBuild(need // 10)) is ExitCode.OK
    tokens, sharing = (summary(tmp_path)[name] for name in ("tokens", "sharing"))
    assert least <= possible / tokens["prompt_computed"] <= most
    assert sharing == {
        "prompt_tokens": tokens["prompt"],
        "distinct_tokens": possible,
        "planned_rate": 1 - possible / tokens["prompt"],
        "achieved_rate": 1 - tokens["prompt_computed"] / tokens["prompt"],
        "achieved_of_planned": possible / tokens["prompt_computed"],
        "deduplicated_rows": 0,
    }


def test_kv_waste_is_small(tmp_path: Path) -> None:
    """256 rows of 100 to 1,024 input and output tokens, as in GPU benchmarks."""
    random_ = random.Random(0)
    lengths = [(random_.randint(100, 1024), random_.randint(100, 1024)) for _ in range(256)]
    columns = {
        "ids": [[random_.randrange(1, 250) for _ in range(prompt)] for prompt, _ in lengths],
        "sampling_params": [json.dumps({"max_tokens": output}) for _, output in lengths],
    }
    write_parquet(tmp_path / "in" / "x.parquet", columns)
    spec = shared_job(tmp_path, "prefix")
    assert run_job(spec, quiet=True, build=DrawingBuild(num_blocks=20_000)) is ExitCode.OK
    steps = pq.read_table(tmp_path / "out" / "stats" / "steps.parquet")
    used, live = (steps[name].to_numpy() for name in ("kv_blocks_used", "kv_tokens_live"))
    waste = 1 - live / (used * BLOCK_SIZE)
    assert waste == pytest.approx(steps["kv_waste"].to_numpy())
    # The mean is weighted by blocks, because the times of steps depend on the machine's load.
    assert 0.005 < np.average(waste, weights=used) <= 0.01
    assert sum(output for _, output in lengths) == summary(tmp_path)["tokens"]["output"]


def texts(tmp_path: Path, count: int = 40) -> list[str]:
    prompts = [f"The same words for every row. {row * 37 % 101}" for row in range(count)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts})
    return prompts


def prefixes(prompts: list[str]) -> int:
    return len({prompt[:length] for prompt in prompts for length in range(1, len(prompt) + 1)})


def test_prefix_sharing_of_a_resumed_job(tmp_path: Path) -> None:
    prompts = texts(tmp_path)
    build = FakeBuild(max_num_seqs=4)
    build.before_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 60 else None
    spec = job(tmp_path, engine={"max_num_seqs": 4})
    assert run_job(spec, build=build, quiet=True) is ExitCode.INTERRUPTED
    assert run_job(spec, build=FakeBuild(max_num_seqs=4), quiet=True) is ExitCode.OK
    sharing = summary(tmp_path)["sharing"]
    assert sharing["prompt_tokens"] == sum(map(len, prompts))
    # The second run planned its rows without those that the first run had finished.
    assert prefixes(prompts) < sharing["distinct_tokens"] <= prefixes(prompts) + 40
    requests = pq.read_table(tmp_path / "out" / "stats" / "requests.parquet")
    assert sharing["distinct_tokens"] == pc.sum(requests["distinct_tokens"]).as_py()


class Watched(FakeBuild):
    """Keeps the engine it builds."""

    built: FakeBuilt

    def __call__(
        self, model: object, engine: object, *, log: Callable[[str], None], **_: object
    ) -> FakeBuilt:
        self.built = super().__call__(model, engine, log=log)
        return self.built


def test_next_window_is_planned_before_the_last_one_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_is_planned = Event()

    def watched(*arguments: Any, **options: Any) -> Iterator[list[PromptRow]]:
        windows = plan_windows(*arguments, **options)
        yield next(windows)
        second = next(windows)
        second_is_planned.set()
        yield second
        yield from windows

    monkeypatch.setattr(pipeline, "plan_windows", watched)
    texts(tmp_path)  # four windows of one part each; the engine has room for less than a window
    build, unfinished = Watched(max_num_seqs=4), []

    def before_step(step: int) -> None:
        if step == 0:  # block until the second window is planned
            assert second_is_planned.wait(_LONG_S)
        unfinished.append(build.built.engine.num_unfinished)

    build.before_step = before_step
    spec = job(tmp_path, engine={"max_num_seqs": 4, "order_window": 10})
    assert run_job(spec, build=build, quiet=True) is ExitCode.OK
    before_a_row_ends = unfinished[: spec.sampling.max_tokens]
    assert before_a_row_ends[0] == 10
    assert before_a_row_ends[-1] == 20, "the engine has the rows of the next window"


def test_finished_rows_are_not_in_memory_while_the_next_window_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[weakref.ref[Any]] = []
    num_alive: list[int] = []
    counted = ReadAhead.counted

    def noting(self: ReadAhead, window: list[PromptRow]) -> list[PromptRow]:
        prompts.extend(weakref.ref(row.token_ids) for row in window)
        return counted(self, window)

    def wait(self: ReadAhead, reading_s: float) -> None:
        until = time.monotonic() + _LONG_S
        # The threads may hold the rows of the last steps.
        while (alive := sum(one() is not None for one in prompts)) > 20:
            if time.monotonic() > until:
                break
            time.sleep(0.001)
        num_alive.append(alive)

    monkeypatch.setattr(ReadAhead, "counted", noting)
    monkeypatch.setattr(ReadAhead, "wait", wait)
    texts(tmp_path, 120)
    spec = job(tmp_path, engine={"order_window": 40}, output={"rows_per_part": 40})
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    assert len(prompts) == 120
    assert len(num_alive) == 2, "the job waits before each window but the first"
    assert max(num_alive) <= 20


@pytest.mark.parametrize("order", ["prefix", "input"])
def test_engine_starts_before_a_large_window_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    has_started, batches, hungry = Event(), [], []
    start_prompts = WorkerPrompts.start

    def noting(
        *arguments: Any, is_starved: Callable[[], bool], **options: Any
    ) -> Iterator[list[PromptRow]]:
        hungry.append(is_starved)
        return plan_windows(*arguments, is_starved=is_starved, **options)

    def start(self: WorkerPrompts, rows: Any) -> Any:
        batches.append(len(rows))
        number, wait = len(batches), start_prompts(self, rows)

        def made() -> Any:
            if number == 1:  # the consumer's thread may not have started yet
                until = time.monotonic() + _LONG_S
                while not hungry[0]() and time.monotonic() < until:
                    time.sleep(0.001)
            if number == 2:
                assert has_started.wait(_LONG_S), "the engine waits for the whole window"
            return wait()

        return made

    monkeypatch.setattr(pipeline, "plan_windows", noting)
    monkeypatch.setattr(WorkerPrompts, "start", start)
    texts(tmp_path, 2100)
    fake = FakeBuild(num_blocks=512)
    fake.before_step = lambda step: has_started.set()
    spec = job(
        tmp_path,
        sampling={"max_tokens": 1},
        engine={"order": order},
        output={"rows_per_part": 5000},
    )
    assert run_job(spec, build=fake, quiet=True) is ExitCode.OK
    assert len(batches) == 2
    requests = pq.read_table(tmp_path / "out" / "stats" / "requests.parquet")
    assert requests["row_id"].to_pylist() == list(range(2100))
