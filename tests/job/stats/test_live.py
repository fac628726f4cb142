"""The live file of a running job, and ``status --watch``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchinfer.console.meter import Counts, Meter
from batchinfer.console.phases import Phase, Phases
from batchinfer.errors import ExitCode
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run import run_job as run_module
from batchinfer.job.run.run_job import run_job
from batchinfer.job.stats.latest_runs import SILENT_S
from batchinfer.job.stats.live import LiveFile, WatchedRun, live_runs
from batchinfer.job.stats.status import Status, read_status
from tests.console.terminal import screen
from tests.job.datasets import write_parquet
from tests.job.fakes import job
from tests.job.output.test_resume import Build

WATCH = (sys.executable, "-m", "batchinfer", "status", "--watch", "--every", "0.1")


@pytest.fixture
def watched() -> WatchedRun:
    return WatchedRun("a job", Phases())


def test_live_file_holds_the_progress(tmp_path: Path, watched: WatchedRun) -> None:
    out = OutputDir(tmp_path)
    out.files.make_directory(out.staging)
    file = LiveFile(out, watched)
    with watched.phases.during(Phase("loading\x1b[2J", 2e9, "bytes")):
        file.write()
    [found] = live_runs(out, time.time())
    assert (found.phase, found.phase_detail) == ("loading\x1b[2J", "0.0 of 2.0 GB")
    assert (found.rows_total, found.eta_s) == (0, None)
    watched.meter = Meter(90, before=10)
    watched.meter.add(Counts(rows=30, begun=50, ended=30, tokens=3000, settled_tokens=3000), None)
    file.write()
    [found] = live_runs(out, time.time())
    assert (found.phase, found.rows_finished, found.rows_running) == ("", 40, 20)
    assert found.eta_s is not None
    assert live_runs(out, time.time() + SILENT_S) == []
    path = out.live / "run.json"
    os.truncate(path, 10)
    assert live_runs(out, time.time()) == []
    file.delete()
    assert out.files.entries(out.live) == []


def test_run_continues_if_the_live_file_cannot_be_written(
    tmp_path: Path, watched: WatchedRun
) -> None:
    out = OutputDir(tmp_path)
    (tmp_path / "_batchinfer").mkdir()
    (tmp_path / "_batchinfer" / "live").write_text("in the way")
    file = LiveFile(out, watched)
    file.write()
    file.delete()
    assert live_runs(out, time.time()) == []


def test_status_before_the_first_finished_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are in flight and none is on disk: the status comes from the live file's tokens."""
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["some words to repeat"] * 12})
    files: list[LiveFile] = []
    begin = LiveFile.__init__

    def noting(self: LiveFile, *options: object) -> None:
        files.append(self)
        begin(self, *options)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module.LiveFile, "__init__", noting)
    seen: list[Status] = []
    out = OutputDir(tmp_path / "out")

    def look(step: int) -> None:
        if step == 3:
            files[0].write()
            seen.append(read_status(out, time.time()))

    spec = job(tmp_path, sampling={"max_tokens": 20, "temperature": 1.0})
    assert run_job(spec, build=Build(look), quiet=True) is ExitCode.OK
    [found] = seen
    assert (found.state, found.rows_done, found.rows_running) == ("running", 0, 12)
    assert found.share is not None
    assert 0 < found.share < 0.5
    assert found.output_tokens
    assert found.eta_is_most
    assert found.eta_s
    assert "0 of 12 rows (0%), 12 in the engine, " in found.line()
    assert "% of the work done" in found.line()
    assert any(line.startswith("rows     0 of 12 (0%), 0 failed, 12 in") for line in found.lines())
    assert any(line.startswith("work ") for line in found.lines())
    assert found.line().endswith(" left")
    assert any(line.startswith("left     at most ") for line in found.lines())
    assert out.files.entries(out.live) == []
    ended = read_status(out, time.time())
    assert (ended.share, ended.phase, ended.tokens_per_s) == (None, None, None)


def test_status_follow_prints_lines_until_the_job_ends(tmp_path: Path) -> None:
    """Two processes watch a job. The one on a terminal is interrupted; the other ends normally."""
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": [f"{row} asks" for row in range(40)]})
    out, watchers = tmp_path / "out", list[subprocess.Popen[str]]()
    controller, terminal = os.openpty()

    def look(step: int) -> None:
        if step != 1:
            return
        watchers.append(subprocess.Popen([*WATCH, str(out)], stdout=subprocess.PIPE, text=True))
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", "NO_COLOR": "1"}
        screens = subprocess.Popen([*WATCH, str(out)], stdout=terminal, env=environment)
        shown = b""
        while b"running" not in shown:
            shown += os.read(controller, 65536)
        screens.send_signal(signal.SIGINT)
        assert screens.wait() == ExitCode.OK
        assert "status of" in "".join(screen(shown.decode())), shown
        assert watchers[0].stdout.readline().startswith("running, ")

    assert run_job(job(tmp_path), build=Build(look), quiet=True) is ExitCode.OK
    os.close(terminal)
    os.close(controller)
    lines = watchers[0].communicate()[0].splitlines()
    assert watchers[0].returncode == ExitCode.OK
    assert lines[-1] == "finished, 40 of 40 rows (100%)"
    assert json.loads((out / "summary.json").read_bytes())["rows"]["ok"] == 40
