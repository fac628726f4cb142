from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from batchinfer.console.bar import bar_line, draw_bar, last_line, make_progress
from batchinfer.console.meter import Counts, Meter
from batchinfer.console.progress import Lines, StallNotice, print_line
from batchinfer.console.table import plain as plain_lines
from batchinfer.errors import ExitCode
from batchinfer.job.run.reporter import summary_facts, too_many_errors
from batchinfer.job.run.run import run_job
from tests.console.steps import a_step
from tests.console.terminal import PseudoTerminal, screen
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job

HALF_FULL = a_step(kv_blocks_used=50, kv_blocks_total=100, kv_blocks_shared=20)


def test_a_line_every_thirty_seconds() -> None:
    now, lines = [0.0], []
    progress = Lines(Meter(200, clock=lambda: now[0]), lines.append)
    for second in range(0, 95, 5):
        now[0] = float(second)
        progress.update(Counts(rows=5, ended=5, tokens=50, settled_tokens=50), HALF_FULL)
    assert lines == [
        "35 of 200 rows (17%), 12 tokens/s, pool 50%, shared 40%, about 2 min 21 s left",
        "65 of 200 rows (32%), 11 tokens/s, pool 50%, shared 40%, about 2 min 05 s left",
        "95 of 200 rows (47%), 11 tokens/s, pool 50%, shared 40%, about 1 min 39 s left",
    ]


def test_a_note_stands_where_the_pool_would() -> None:
    now, lines = [0.0], []
    progress = Lines(Meter(200, clock=lambda: now[0]), lines.append)
    progress.note("3 of 4 workers up, their pools 50%")
    now[0] = 31.0
    progress.update(Counts(rows=0, tokens=62), None)
    assert lines == ["0 of 200 rows (0%), 2 tokens/s, 3 of 4 workers up, their pools 50%"]


def test_rows_that_are_reused_are_done_and_say_nothing_of_the_speed() -> None:
    now, lines = [0.0], []
    progress = Lines(Meter(200, clock=lambda: now[0]), lines.append)
    progress.reuse(100)
    now[0] = 40.0
    progress.update(Counts(rows=40, ended=40, tokens=400, settled_tokens=400), HALF_FULL)
    now[0] = 80.0
    progress.reuse(20)
    pool = "pool 50%, shared 40%"
    assert lines == [
        f"140 of 200 rows (70%), 100 rows reused, 10 tokens/s, {pool}, about 1 min 00 s left",
        f"160 of 200 rows (80%), 120 rows reused, 5 tokens/s, {pool}, about 1 min 20 s left",
    ]


def test_no_guess_before_a_row_is_finished() -> None:
    now, lines = [0.0], []
    progress = Lines(Meter(200, clock=lambda: now[0]), lines.append)
    now[0] = 31.0
    progress.update(Counts(rows=0, tokens=0), HALF_FULL)
    assert lines == ["0 of 200 rows (0%), 0 tokens/s, pool 50%, shared 40%"]


def test_a_step_that_does_not_end_is_told_of_ever_more_rarely() -> None:
    now, lines = [0.0], []
    progress = StallNotice(
        Lines(Meter(200, clock=lambda: now[0]), lines.append), lines.append, lambda: now[0]
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
    progress.update(Counts(rows=5, ended=5, tokens=50, settled_tokens=50), HALF_FULL)
    now[0] += 29
    progress.check()
    progress.close()
    assert [line.partition(",")[0] for line in lines] == ["5 of 200 rows (2%)"]


@pytest.mark.parametrize("quiet", [False, True])
def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
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


def a_meter(**counts: int) -> Meter:
    """One that has run for ten seconds."""
    now = [0.0]
    meter = Meter(2048, before=1000, clock=lambda: now[0])
    now[0] = 10.0
    meter.add(Counts(**counts), HALF_FULL)
    return meter


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (25, " 50% ####....  1,524 of 3"),
        (40, " 50% ####....  1,524 of 3,048 rows"),
        (79, " 50% ######.......  1,524 of 3,048 rows finished, 7 failed, about 29.1 s left"),
        (
            159,
            " 50% #############.............  1,524 of 3,048 rows finished, 7 failed, "
            "about 29.1 s left, 524 tokens/s, pool 50%, shared 40%, 10.0 s so far",
        ),
    ],
)
def test_a_bar_fits_its_terminal_and_needs_no_colour(
    monkeypatch: pytest.MonkeyPatch, columns: int, line: str
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    meter = a_meter(rows=524, ended=524, tokens=5240, settled_tokens=5240)
    meter.failed = 7
    found = bar_line(meter, columns)
    assert line.startswith(found)
    assert len(found) <= columns
    assert columns < 30 or found == line


def summary_of_a_job(workers: int, *, found: float, planned: float) -> dict[str, Any]:
    """What the last lines read of a ``summary.json``."""
    kv = dict.fromkeys(("mean_utilization", "peak_utilization", "mean_waste"), 0.5)
    kv |= dict.fromkeys(("contiguous_waste", "sharing_saving"), 0.5)
    return {
        "rows": {"ok": 4, "error": 0, "error_codes": {}, "control_text": 0, "reused": 0},
        "tokens": {"prompt": 100, "output": 10},
        "time_s": {"wall": 2.0, "load": 1.0},
        "throughput": {"output_tokens_per_s": 5.0},
        "workers": workers,
        "kv": {**kv, "num_blocks": 64, "block_size": 16, "prefix_hit_rate": found},
        "sharing": {"deduplicated_rows": 0, "planned_rate": planned},
        "accept": {"samples_tried": 0},
        "out_of_memory": {"count": 0},
    }


def test_a_pool_of_several_workers_is_said_to_be_of_each() -> None:
    alone, fleet = (
        list(plain_lines(summary_facts(summary_of_a_job(n, found=0.4, planned=0.5), Path("out"))))
        for n in (1, 2)
    )
    assert "pool     64 blocks of 16 tokens, 50.0% used on average, 50.0% at most" in alone
    assert (
        "pool     64 blocks of 16 tokens on each of 2 workers, 50.0% used on average, 50.0% at most"
        in fleet
    )


def test_no_more_is_found_than_rows_have_in_common() -> None:
    less, more = (
        " ".join(plain_lines(summary_facts(summary_of_a_job(2, found=f, planned=0.5), Path("o"))))
        for f in (0.4, 0.6)
    )
    assert "40.0% of the prompt tokens were there already, of 50.0% that rows have" in less
    assert "60.0% of the prompt tokens were there already files" in more


def test_work_on_rows_in_the_engine_is_no_share_of_finished_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    now = [0.0]
    meter = Meter(2048, clock=lambda: now[0])
    now[0] = 10.0
    meter.add(
        Counts(
            rows=50,
            ended=50,
            begun=950,
            most_tokens=9500,
            tokens=50 * 10 + 900 * 5,
            settled_tokens=500,
        ),
        None,
    )
    rows = "50 of 2,048 rows (2%), 900 in the engine, 24% of the work done, 500 tokens/s"
    assert meter.line.startswith(rows)
    bar = bar_line(meter, 111)
    assert bar.startswith(" 24% ####..............  50 of 2,048 rows finished, about 31.0 s left")
    assert ", 900 in the engine" in bar


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_what_is_done_differs_from_what_is_left_without_colour(
    monkeypatch: pytest.MonkeyPatch, no_colour: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_colour)
    with PseudoTerminal(monkeypatch):
        bars = [draw_bar(share, 4) for share in (0.0, 0.49, 0.999, 1.0)]
    assert [plain(bar) for bar in bars] == ["────", "━───", "━━━─", "━━━━"]
    assert all(("\x1b" in bar) != bool(no_colour) for bar in bars)


def test_nothing_is_left_of_what_a_terminal_writes_at_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with PseudoTerminal(monkeypatch) as terminal:
        progress = make_progress(Meter(100, before=50), quiet=False)
        for event in ("step", "^C", "step", "line", "step", "^C"):
            if event == "step":
                progress.update(Counts(rows=5, ended=5, tokens=30), HALF_FULL)
            elif event == "line":
                print_line("a line", to_stderr=True)
            else:
                sys.stderr.write(event)  # where the cursor is, as the terminal does
        progress.close()
        print_line("stopped", to_stderr=True)
    shown = screen(plain(terminal.text))
    assert shown[0] == "a line"
    assert shown[1].startswith("65 of 150 rows (43%), 15 of them in ")
    assert shown[2:] == ["stopped"]


def test_the_last_line_is_never_cut() -> None:
    now = [0.0]
    meter = Meter(5_847, before=153, draws=False, clock=lambda: now[0])
    now[0] = 51.3
    meter.add(Counts(rows=5_847, prefill_tokens=187_600), None)
    done = "6,000 of 6,000 rows, 5,847 of them in 51.3 s"
    assert last_line(meter, 40) == done
    assert last_line(meter, 79) == f"{done}, 114.0 rows/s"
    assert last_line(meter, 99) == f"{done}, 114.0 rows/s, 3,657 input tokens/s"


def test_what_has_not_begun_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with PseudoTerminal(monkeypatch) as terminal:
        make_progress(Meter(10), quiet=False).close()
    assert terminal.text == ""


def test_no_bar_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = make_progress(Meter(10), quiet=False)
    progress.update(Counts(rows=10, tokens=30), HALF_FULL)
    progress.close()
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_no_stderr_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    make_progress(Meter(10), quiet=False).update(Counts(rows=1, tokens=1), None)


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


def test_a_run_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "15 of 25 rows were finished before" in shown
    assert "\r 60% " in plain(terminal.text)  # where the second begins
    assert "100%" not in "".join(shown)
