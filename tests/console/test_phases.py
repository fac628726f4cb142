"""Phases: their display, and the sums of their times."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path

import pytest

from batchinfer.console.phases import (
    Phase,
    PhaseLines,
    Phases,
    StatusLine,
    active_phases,
    make_phase_view,
    phase,
)
from batchinfer.errors import ExitCode
from batchinfer.job.run.run_job import run_job
from batchinfer.job.stats.run_record import read_run
from batchinfer.job.storage.filesystem import LocalFiles
from tests.console.conftest import Clock
from tests.console.terminal import PseudoTerminal, screen
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job

pytestmark = pytest.mark.usefixtures("phases_are_shown")


def test_times_of_nested_phases_add_up_to_the_time_that_passed(clock: Clock) -> None:
    phases = Phases(clock=clock)
    with phases, phase("loading"):
        clock.now += 2
        with phase("timing kernels"):
            clock.now += 1
        clock.now += 4
    with phases, phase("loading"):
        clock.now += 8
    assert phases.seconds == {"loading": 14.0, "timing kernels": 1.0}
    assert active_phases() is None


def test_long_phases_get_lines(clock: Clock) -> None:
    lines = list[str]()
    phases = Phases(PhaseLines(lines.append), clock)
    with phases.during(Phase("reading inputs")):
        clock.now += 0.4
        phases.check()
    with phases.during(Phase("loading the model", 14.9e9, "bytes")) as loading:
        for _ in range(70):
            clock.now += 1
            loading.advance(0.2e9)
            phases.check()
    with phases.during(Phase("capturing\x1b[2J", 12)) as capturing:
        clock.now += 0.6
        capturing.advance(12)
    assert lines == [
        "still loading the model: 6.0 of 14.9 GB, 30.0 s",
        "still loading the model: 12.0 of 14.9 GB, 1 min 00 s",
        "loading the model: 14.0 of 14.9 GB, 1 min 10 s",
        "capturing\\x1b[2J: 12 of 12, 0.6 s",
    ]


def test_terminal_shows_phases_on_one_line(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    with PseudoTerminal(monkeypatch) as terminal:
        phases = Phases(StatusLine(), clock)
        for name in ("reading inputs", "loading the model\x1b[2J\n"):
            with phases.during(Phase(name)):
                clock.now += 1
                phases.check()
                clock.now += 1
                phases.check()
    assert "\n" not in terminal.text
    assert "\x1b[2J" not in terminal.text
    shown = [screen(piece) for piece in terminal.text.split("\r")]
    assert [*filter(None, shown)] == [
        ["reading inputs, 1.0 s"],
        ["reading inputs, 2.0 s"],
        ["loading the model\\x1b[2J\\n, 1.0 s"],
        ["loading the model\\x1b[2J\\n, 2.0 s"],
    ]
    assert screen(terminal.text) == []  # the line is free for the next writer


def test_view_depends_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_phase_view(quiet=True) is None
    monkeypatch.setattr(sys, "stderr", StringIO())
    assert isinstance(make_phase_view(quiet=False), PhaseLines)
    monkeypatch.setattr(sys, "stderr", None)
    assert make_phase_view(quiet=False) is None


def test_thread_shows_a_phase_while_it_lasts(clock: Clock) -> None:
    lines = list[str]()
    with Phases(PhaseLines(lines.append), clock), phase("loading the model"):
        clock.now = 31.0
        while not lines:
            pass
    assert lines == ["still loading the model, 31.0 s", "loading the model, 31.0 s"]


def test_run_records_its_phases(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["one", "two"], "id": [1, 2]})
    spec = job(tmp_path)
    spec = spec.model_copy(update={"input": spec.input.model_copy(update={"id_column": "id"})})
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    path = tmp_path / "out" / "_batchinfer" / "runs" / "run-00001.json"
    names = list(read_run(LocalFiles(), path).phases)
    assert names == [
        "reading inputs",
        "hashing inputs",
        "reading finished rows",
        "checking ids",
        "starting text processes",
        "reading and planning rows",
    ]
