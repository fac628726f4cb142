from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchinfer.console.progress import Lines, StallNotice, make_progress, print_line
from batchinfer.engine.stats import StepStats
from batchinfer.job.run.reporter import too_many_errors

HALF_FULL = cast(
    StepStats, SimpleNamespace(kv_blocks_used=50, kv_blocks_total=100, kv_blocks_shared=20)
)


def test_a_line_every_thirty_seconds() -> None:
    now, lines = [0.0], []
    progress = Lines(200, clock=lambda: now[0], write=lines.append)
    for second in range(0, 95, 5):
        now[0] = float(second)
        progress.update(rows=5, tokens=50, stats=HALF_FULL)
    assert lines == [
        "35 of 200 rows, 12 tokens/s, pool 50%, shared 40%, about 2 min 21 s left",
        "65 of 200 rows, 11 tokens/s, pool 50%, shared 40%, about 2 min 05 s left",
        "95 of 200 rows, 11 tokens/s, pool 50%, shared 40%, about 1 min 39 s left",
    ]


def test_a_note_stands_where_the_pool_would() -> None:
    now, lines = [0.0], []
    progress = Lines(200, clock=lambda: now[0], write=lines.append)
    progress.note("3 of 4 workers up, pools 50%")
    now[0] = 31.0
    progress.update(rows=0, tokens=62, stats=None)
    assert lines == ["0 of 200 rows, 2 tokens/s, 3 of 4 workers up, pools 50%"]


def test_no_guess_before_a_row_is_finished() -> None:
    now, lines = [0.0], []
    progress = Lines(200, clock=lambda: now[0], write=lines.append)
    now[0] = 31.0
    progress.update(rows=0, tokens=0, stats=HALF_FULL)
    assert lines == ["0 of 200 rows, 0 tokens/s, pool 50%, shared 40%"]


def test_a_step_that_does_not_end_is_told_of_ever_more_rarely() -> None:
    now, lines = [0.0], []
    progress = StallNotice(
        Lines(200, clock=lambda: now[0], write=lines.append), lines.append, lambda: now[0]
    )
    told = []
    for second in range(0, 400, 15):
        now[0] = float(second)
        progress.check()
        if len(lines) > len(told):
            told.append(second)
    assert told == [30, 60, 120, 240]
    assert lines[2].startswith("no step has ended for 2 min 00 s; ")
    lines.clear()
    progress.update(rows=5, tokens=50, stats=HALF_FULL)
    now[0] += 29
    progress.check()
    progress.close()
    assert [line.partition(",")[0] for line in lines] == ["5 of 200 rows"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "quiet", "shows"),
    [(Terminal(), False, True), (Terminal(), True, False), (io.StringIO(), False, False)],
)
def test_a_bar_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, quiet: bool, shows: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    progress = make_progress(10, quiet=quiet)
    progress.update(rows=10, tokens=30, stats=HALF_FULL)
    progress.close()
    assert (
        "10/10 rows" in stream.getvalue() and "pool 50%, shared 40%" in stream.getvalue()
    ) == shows


def test_no_stderr_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    make_progress(10, quiet=False).update(rows=1, tokens=1, stats=None)


def test_a_closed_stream_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    print_line("hello")


def test_too_many_errors_says_which() -> None:
    rows: dict[str, Any] = {"total": 100, "error": 5, "error_codes": {"empty_prompt": 5}}
    message = too_many_errors(rows, 0.01, Path("/out"))
    assert "5 of 100 rows failed" in message
    assert "empty_prompt 5" in message
    assert "/out" in message
