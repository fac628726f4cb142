"""Progress on a terminal and elsewhere, and the last lines of a run."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer.console.meter import Counts, Meter
from batchinfer.console.progress_bar import (
    Lines,
    MeteredProgress,
    bar_line,
    draw_bar,
    last_line,
    make_progress,
)
from batchinfer.console.table import plain as plain_lines
from batchinfer.console.terminal import LINE_EVERY_S, print_line
from batchinfer.errors import ExitCode
from batchinfer.job.run.reporter import summary_facts
from batchinfer.job.run.run_job import run_job
from tests.console.conftest import Clock
from tests.console.steps import a_step
from tests.console.terminal import PseudoTerminal, screen
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job

HALF_FULL = a_step(kv_blocks_used=50, kv_blocks_total=100, kv_blocks_shared=20)
POOL = "pool 50%, shared 40%"


def lines_into(lines: list[str], clock: Callable[[], float]) -> Lines:
    meter = Meter(200, clock=clock)
    return Lines(meter, lambda: lines.append(meter.line), LINE_EVERY_S)


def test_line_every_thirty_seconds(clock: Clock) -> None:
    lines: list[str] = []
    progress = lines_into(lines, clock)
    for second in range(0, 95, 5):
        clock.now = float(second)
        progress.update(Counts(rows=5, ended=5, tokens=50, settled_tokens=50), HALF_FULL)
    assert lines == [
        f"35 of 200 rows (17%), 12 tokens/s, {POOL}, about 2 min 21 s left",
        f"65 of 200 rows (32%), 11 tokens/s, {POOL}, about 2 min 05 s left",
        f"95 of 200 rows (47%), 11 tokens/s, {POOL}, about 1 min 39 s left",
    ]


def test_note_replaces_the_pool_and_eta_waits_for_a_finished_row(clock: Clock) -> None:
    lines: list[str] = []
    progress = lines_into(lines, clock)
    clock.now = 31.0
    progress.update(Counts(tokens=62), HALF_FULL)
    progress.note("3 of 4 workers running, their pools 50%")
    clock.now = 62.0
    progress.update(Counts(tokens=62), None)
    assert lines == [
        f"0 of 200 rows (0%), 2 tokens/s, {POOL}",
        "0 of 200 rows (0%), 2 tokens/s, 3 of 4 workers running, their pools 50%",
    ]


def test_reused_rows_are_finished_but_do_not_count_in_the_speed(clock: Clock) -> None:
    lines: list[str] = []
    progress = lines_into(lines, clock)
    progress.reuse(100)
    clock.now = 40.0
    progress.update(Counts(rows=40, ended=40, tokens=400, settled_tokens=400), HALF_FULL)
    clock.now = 80.0
    progress.reuse(20)
    assert lines == [
        f"140 of 200 rows (70%), 100 rows reused, 10 tokens/s, {POOL}, about 1 min 00 s left",
        f"160 of 200 rows (80%), 120 rows reused, 5 tokens/s, {POOL}, about 1 min 20 s left",
    ]


def test_stall_warnings_become_rarer(clock: Clock) -> None:
    lines: list[str] = []
    progress = MeteredProgress(Meter(200, clock=clock), lines.append, clock)
    warned = []
    for second in range(0, 400, 15):
        clock.now = float(second)
        progress.check()
        if len(lines) > len(warned):
            warned.append(second)
    assert warned == [30, 60, 120, 240]
    assert lines[2].startswith("no step has finished for 2 min 00 s; ")
    progress.update(Counts(rows=5), HALF_FULL)
    clock.now += 29
    progress.check()
    progress.close()
    assert len(lines) == 4


@pytest.mark.parametrize("quiet", [False, True])
def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    with PseudoTerminal(monkeypatch) as terminal:
        progress = make_progress(Meter(10, before=5), quiet=quiet)
        progress.update(Counts(rows=5, ended=5, tokens=30), HALF_FULL)
        progress.fail(2)
        progress.close()
    if quiet:
        assert terminal.text == ""
        return
    bars = [line for line in plain(terminal.text).split("\r") if "%" in line]
    assert bars[0].startswith(" 66% ━━━━━━━━━━──────  10 of 15 rows finished, about ")
    last = r"10 of 15 rows \(66%\), 5 of them in \d+(\.\d)? m?s, 2 failed, [\d,]+ tokens/s"
    (shown,) = screen(plain(terminal.text))
    assert re.fullmatch(last, shown)


def plain(text: str) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (25, " 50% ####....  1,524 of 3"),
        (40, " 50% ####....  1,524 of 3,048 rows"),
        (79, " 50% ######.......  1,524 of 3,048 rows finished, 7 failed, about 29.1 s left"),
        (
            159,
            " 50% #############.............  1,524 of 3,048 rows finished, 7 failed, "
            f"about 29.1 s left, 524 tokens/s, {POOL}, 10.0 s so far",
        ),
    ],
)
def test_bar_fits_its_terminal_and_needs_no_color(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, columns: int, line: str
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    meter = Meter(2048, before=1000, clock=clock)
    clock.now = 10.0
    meter.add(Counts(rows=524, ended=524, tokens=5240, settled_tokens=5240), HALF_FULL)
    meter.failed = 7
    found = bar_line(meter, columns)
    assert line.startswith(found)
    assert len(found) <= columns
    assert columns < 30 or found == line


def summary_lines(workers: int, *, found: float = 0.4) -> list[str]:
    """Return the last lines of a run whose summary has these values."""
    kv = dict.fromkeys(("mean_utilization", "peak_utilization", "mean_waste"), 0.5)
    kv |= dict.fromkeys(("contiguous_waste", "sharing_saving"), 0.5)
    summary: dict[str, Any] = {
        "rows": {"ok": 4, "error": 0, "error_codes": {}, "control_text": 0, "reused": 0},
        "input": {"replaced_cells": 0},
        "tokens": {"prompt": 100, "output": 10},
        "time_s": {"wall": 2.0, "load": 1.0},
        "throughput": {"output_tokens_per_s": 5.0},
        "workers": workers,
        "kv": {**kv, "num_blocks": 64, "block_size": 16, "prefix_hit_rate": found},
        "sharing": {"deduplicated_rows": 0, "planned_rate": 0.5},
        "accept": {"samples_tried": 0},
        "out_of_memory": {"count": 0},
    }
    return list(plain_lines(summary_facts(summary, Path("out"))))


@pytest.mark.parametrize(("workers", "where"), [(1, ""), (2, " on each of 2 workers")])
def test_summary_names_the_worker_of_the_pool(workers: int, where: str) -> None:
    pool = f"pool     64 blocks of 16 tokens{where}; 50.0% used on average, at most 50.0%"
    assert pool in summary_lines(workers)


@pytest.mark.parametrize(("found", "rest"), [(0.4, " (rows share 50.0%)"), (0.6, " files")])
def test_summary_never_reports_more_reuse_than_rows_share(found: float, rest: str) -> None:
    lines = " ".join(summary_lines(2, found=found))
    assert f"{found:.1%} of the prompt tokens were cached{rest}" in lines


def test_work_on_unfinished_rows_is_separate_from_finished_rows(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    meter = Meter(2048, clock=clock)
    clock.now = 10.0
    started = Counts(begun=950, most_tokens=9500, tokens=50 * 10 + 900 * 5)
    meter.add(started + Counts(rows=50, ended=50, settled_tokens=500), None)
    rows = "50 of 2,048 rows (2%), 900 in the engine, 24% of the work done, 500 tokens/s"
    assert meter.line.startswith(rows)
    bar = bar_line(meter, 111)
    assert bar.startswith(" 24% ####..............  50 of 2,048 rows finished, about 31.0 s left")
    assert ", 900 in the engine" in bar


@pytest.mark.parametrize("no_color", ["", "1"])
def test_bar_is_readable_without_color(monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    with PseudoTerminal(monkeypatch):
        bars = [draw_bar(share, 4) for share in (0.0, 0.49, 0.999, 1.0)]
    assert [plain(bar) for bar in bars] == ["────", "━───", "━━━─", "━━━━"]
    assert all(("\x1b" in bar) != bool(no_color) for bar in bars)


def test_ctrl_c_clears_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with PseudoTerminal(monkeypatch) as terminal:
        progress = make_progress(Meter(100, before=50), quiet=False)
        for event in ("step", "^C", "step", "line", "step", "^C"):
            if event == "step":
                progress.update(Counts(rows=5, ended=5, tokens=30), HALF_FULL)
            elif event == "line":
                print_line("a line", to_stderr=True)
            else:
                sys.stderr.write(event)  # a terminal echoes ^C at the cursor
        progress.close()
        print_line("stopped", to_stderr=True)
    first, last, *rest = screen(plain(terminal.text))
    assert first == "a line"
    assert last.startswith("65 of 150 rows (43%), 15 of them in ")
    assert rest == ["stopped"]


def test_last_line_leaves_out_speeds_that_do_not_fit(clock: Clock) -> None:
    meter = Meter(5_847, before=153, draws=False, clock=clock)
    clock.now = 51.3
    meter.add(Counts(rows=5_847, prefill_tokens=187_600), None)
    done = "6,000 of 6,000 rows, 5,847 of them in 51.3 s"
    assert last_line(meter, 40) == done
    assert last_line(meter, 79) == f"{done}, 114.0 rows/s"
    assert last_line(meter, 99) == f"{done}, 114.0 rows/s, 3,657 input tokens/s"


def test_nothing_is_written_without_a_step_or_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with PseudoTerminal(monkeypatch) as terminal:
        make_progress(Meter(10), quiet=False).close()
    assert terminal.text == ""
    for stderr in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stderr)
        progress = make_progress(Meter(10), quiet=False)
        progress.update(Counts(rows=10, tokens=30), HALF_FULL)
        progress.close()
        assert stderr is None or stderr.getvalue() == ""


def test_closed_stderr_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    print_line("hello")


def test_run_and_resumed_run_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": [str(n) for n in range(25)]})
    spec = job(tmp_path)
    with PseudoTerminal(monkeypatch, "stdout", "stderr") as terminal:
        assert run_job(spec, build=FakeBuild()) is ExitCode.OK
        (tmp_path / "out" / "_SUCCESS").unlink()
        (tmp_path / "out" / "data" / "part-00001.parquet").unlink()
        assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    shown = screen(plain(terminal.text))
    ends = [line for line in shown if line.startswith("25 of 25 rows")]
    assert ends[0].startswith("25 of 25 rows in ")
    assert ends[1].startswith("25 of 25 rows, 10 of them in ")
    assert "15 of 25 rows were already finished" in shown
    assert "\r 60% " in plain(terminal.text)  # the second run starts here
    assert "100%" not in "".join(shown)
