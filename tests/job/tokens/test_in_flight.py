"""Tokens in flight are flushed in time, and no obsolete tokens stay on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from batchinfer.console.meter import Meter
from batchinfer.console.progress_bar import make_progress
from batchinfer.engine.engine import Engine
from batchinfer.engine.request import Completion, Request
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.tokens import in_flight
from batchinfer.job.tokens.in_flight import TokensInFlight
from batchinfer.job.tokens.token_files import TokenFiles
from tests.engine.fake import hashed, make_engine, make_request
from tests.engine.searches import beams
from tests.job.fakes import begin

PLAN = Manifest("f", {}, (), (), 1000, 100, "2026-11-20T10:00:00")


@pytest.fixture
def out(tmp_path: Path) -> OutputDir:
    out = OutputDir(tmp_path / "out")
    begin(out, PLAN)
    return out


def observer(most_lost_s: float = 0.0, kept: Any = None, **options: Any) -> TokensInFlight:
    progress = make_progress(Meter(100), quiet=True)
    return TokensInFlight(most_lost_s, progress, kept or {}, **options)


@pytest.mark.parametrize(
    ("most_lost_s", "is_alone", "dues"),
    [
        (5.0, False, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]),
        (5.0, True, [3.0, 4.5, 6.0, 7.5]),
        (60.0, True, [3.0, 4.5, 6.0, 7.5]),
    ],
)
def test_tokens_are_flushed_before_most_lost_s_has_passed(
    most_lost_s: float, is_alone: bool, dues: list[float]
) -> None:
    """Part of ``most_lost_s`` is reserved for a step and a write.

    A row that runs alone is flushed a second after its first new token, however long its prompt
    took.
    """
    now, handed_over = [0.0], []
    tokens = observer(most_lost_s, clock=lambda: now[0])
    tokens.is_row_alone = is_alone
    engine, _ = make_engine(64)
    with tokens.observing(engine, lambda update: handed_over.append(now[0])):
        for half_seconds in range(17):
            now[0] = half_seconds / 2
            tokens.stepped((), (), output_tokens=int(now[0] >= 2.0))
        assert handed_over == dues


def requests(random: Random) -> list[Request]:
    rows = [
        make_request(
            row, [row + 1, 2], max_tokens=random.randrange(1, 60), n=1 + row % 3, logprobs=2
        )
        for row in range(12)
    ]
    return [*rows, beams(12, [7, 8], 3, n=2, max_tokens=20)]


def never_ends(context: bytes, stream: int, sample: int, position: int) -> int:
    return hashed(context, stream, sample, position) or 1


def answers(done: Sequence[Completion]) -> dict[int, list[tuple[list[int], Any]]]:
    return {
        one.request.row_id: [(out.token_ids.tolist(), out.logprobs) for out in one.outputs]
        for one in done
    }


@pytest.mark.parametrize("seed", range(4))
def test_tokens_of_crashed_runs_are_drawn_once_and_obsolete_files_deleted(
    out: OutputDir, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "_MOST_OBSOLETE_TOKENS", 100)
    monkeypatch.setattr(in_flight, "_FILE_COST_TOKENS", 50)
    random = Random(seed)
    rows = requests(random)
    engine, _ = make_engine(256, next_token=never_ends)
    for row in rows:
        engine.add_request(row)
    unbroken = answers([one for _ in range(100) for one in engine.step().completions])
    found: dict[int, Any] = {}
    for number in range(40):
        files = TokenFiles(out, PLAN, {}, f"run-{number:05d}")
        missing = [range(row.row_id, row.row_id + 1) for row in rows if row.row_id not in found]
        tokens = observer(kept=files.recover(missing)[0])
        engine, _ = make_engine(256, next_token=never_ends)
        death = random.randrange(2, 12)
        with tokens.observing(engine, files.write):
            for row in rows:
                if row.row_id not in found:
                    engine.add_request(row)
            for _ in range(death):
                found |= answers(engine.step().completions)
                assert len(out.files.entries(out.tokens)) <= 30
        if len(found) == len(rows):
            break
    assert found == unbroken
    assert not out.files.entries(out.tokens)


def run(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.step()


def test_finished_samples_are_kept_while_the_row_has_further_requests(out: OutputDir) -> None:
    files = TokenFiles(out, PLAN, {}, "run-00001")
    first = make_request(0, [1, 2], max_tokens=3, n=2)
    engine, _ = make_engine(64, next_token=never_ends)
    with observer().observing(engine, files.write):
        engine.add_request(first)
        run(engine, 3)
        engine.add_request(replace(first, number=1, first_sample=2))
        run(engine, 2)
    kept = TokenFiles(out, PLAN, {}, "run-00002").recover([range(1)])[0]
    assert [len(one.token_ids) for one in kept[0, 0].partial().finished] == [3, 3]
    assert [len(one.token_ids) for one in kept[0, 1].partial().samples] == [2, 2]
    again, runner = make_engine(64, next_token=never_ends)
    with observer(kept=kept).observing(again, files.write):
        again.add_request(first)
        (completion,) = again.step().completions
    assert [len(one.token_ids) for one in completion.outputs] == [3, 3]
    assert not runner.steps


def test_tokens_of_a_row_that_resumes_after_a_flush_are_kept(out: OutputDir) -> None:
    """The flush writes the row's kept tokens; the tokens drawn afterwards continue them."""
    first, second = (make_request(row, [5, row], max_tokens=20) for row in range(2))
    for number, steps in enumerate([3, 4], start=1):
        files = TokenFiles(out, PLAN, {}, f"run-{number:05d}")
        tokens = observer(kept=files.recover([range(2)])[0])
        engine, _ = make_engine(64, next_token=never_ends)
        with tokens.observing(engine, files.write):
            engine.add_request(first)
            run(engine, 1)  # flushes before the engine gets the second row
            engine.add_request(second)
            run(engine, steps)
    kept, _ = TokenFiles(out, PLAN, {}, "run-00003").recover([range(2)])
    assert kept[1, 0].num_tokens == 3 + 4


@pytest.mark.parametrize("same_key", [True, False])
def test_request_with_another_key_ignores_kept_tokens(out: OutputDir, same_key: bool) -> None:
    files = TokenFiles(out, PLAN, {}, "run-00001")
    request = make_request(0, [1, 2], max_tokens=9)
    engine, _ = make_engine(64, next_token=never_ends)
    with observer().observing(engine, files.write):
        engine.add_request(request)
        run(engine, 3)
    tokens = observer(kept=TokenFiles(out, PLAN, {}, "run-00002").recover([range(1)])[0])
    request = request if same_key else replace(request, key=bytes(16))
    assert (tokens.partial_output(request) is not None) == same_key
