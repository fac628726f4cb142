"""With ``--log-format json``, every printed line is a JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchinfer.console.json_log import MOST_OF_LINE, CapturedStream, JsonDisplay, JsonLog
from batchinfer.console.meter import Counts, Meter
from batchinfer.console.phases import Phase, Phases
from batchinfer.errors import ExitCode
from batchinfer.job.run.run_job import run_job
from tests.console.conftest import Clock
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job

PROGRAM = """
import logging, os, signal, subprocess, sys, warnings
from pathlib import Path
from batchinfer.console.json_log import JsonDisplay
from batchinfer.job.run.run_job import run_job
from batchinfer.cli.program import log_as_json, run_program
from tests.job.fakes import FakeBuild, job

def app(prog_name):
    log = log_as_json(keep_stdout=False)
    if sys.argv[2] == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    print("a line\\x1b[2J on stdout")
    os.write(2, b"native \\xff text without an end")
    warnings.warn("a warning")
    logging.getLogger("some.library").warning("%s", "two\\nlines")
    subprocess.run(["echo", "of a child"])
    def before_step(step):
        if sys.argv[2] == "bug":
            raise ValueError("a bug")
    build = FakeBuild()
    build.before_step = before_step
    rate = 0.0 if sys.argv[2] == "errors" else 1.0
    spec = job(Path(sys.argv[1]), errors={"max_error_rate": rate})
    spec = spec.model_copy(update={"name": "\\x1b[2J\\n{\\"}\"})
    raise SystemExit(int(run_job(spec, display=JsonDisplay(log), build=build)))

run_program(app)
"""


def objects(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "event", "message"} <= one.keys() for one in found)
    return found


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("well", ExitCode.OK),
        ("errors", ExitCode.TOO_MANY_ROW_ERRORS),
        ("bug", ExitCode.BUG),
        ("signal", ExitCode.INTERRUPTED),
    ],
)
def test_every_output_line_is_a_json_object(tmp_path: Path, how: str, code: ExitCode) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["one", "", "two\x1b[2J"]})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), how],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    found = objects(done.stderr)
    assert (found[-1]["event"], found[-1]["exit_code"]) == ("exit", code)
    assert found[-1]["level"] == ("error" if code else "info")
    assert bool(found[-1]["message"]) == bool(code)
    if how == "signal":
        return
    outputs = [one["message"] for one in found if one["event"] == "output"]
    assert {"a line\\x1b[2J on stdout", "of a child"} <= {*outputs}
    assert any(line.startswith("native") for line in outputs)
    assert any("a warning" in line for line in outputs)
    [record] = [one for one in found if one["event"] == "log"]
    assert (record["logger"], record["message"]) == ("some.library", "two\\nlines")
    if how == "bug":
        assert "please report it with" in found[-1]["message"]
    else:
        [ended] = [one for one in found if one["event"] == "job_ended"]
        assert ended["summary"]["rows"]["error"] == 1


@pytest.mark.usefixtures("phases_are_shown")
def test_events_of_phases_and_progress(clock: Clock) -> None:
    lines: list[bytes] = []
    display = JsonDisplay(JsonLog(lines.append, clock=lambda: 1_700_000_000.25))
    phases = Phases(display.phases, clock=clock)
    with phases.during(Phase("loading the model", 4e9, "bytes")) as loading:
        for _ in range(40):
            clock.now += 1
            phases.check()
        loading.advance(2e9)
    meter = Meter(100, before=20, clock=clock)
    progress = display.progress(meter)
    for _ in range(25):
        clock.now += 1
        progress.update(Counts(rows=1, begun=1, ended=1, tokens=7, settled_tokens=7), None)
    progress.fail(2)
    progress.close()
    found = objects(b"".join(lines).decode())
    assert [one["event"] for one in found] == [
        *("phase", "phase", "phase_ended", "progress", "progress", "progress")
    ]
    assert {one["time"] for one in found} == {"2023-11-14T22:13:20.250Z"}
    assert (found[2]["phase"], found[2]["detail"]) == ("loading the model", "2.0 of 4.0 GB")
    last = found[-1]
    assert (last["rows_finished"], last["rows_failed"], last["rows_total"]) == (45, 2, 120)
    assert (last["output_tokens"], last["tokens_per_s"], last["eta_s"]) == (175, 7.0, 75.0)


def test_quiet_log_has_only_errors(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["one", ""]})
    lines: list[bytes] = []
    display = JsonDisplay(JsonLog(lines.append), quiet=True)
    spec = job(tmp_path, errors={"max_error_rate": 0.0})
    assert run_job(spec, display=display, build=FakeBuild()) is ExitCode.TOO_MANY_ROW_ERRORS
    assert [json.loads(line)["event"] for line in lines] == ["too_many_errors"]


def test_json_log_ignores_a_broken_pipe() -> None:
    def write(line: bytes) -> None:
        raise BrokenPipeError

    log = JsonLog(write)
    log.emit("one", "line")
    log.end(0, "", "info")
    log.emit("two", "lines")


def test_long_line_becomes_several_objects() -> None:
    lines: list[bytes] = []
    descriptor = os.open(os.devnull, os.O_WRONLY)
    captured = CapturedStream(descriptor, "stderr", JsonLog(lines.append))
    os.write(descriptor, b"x" * (3 * MOST_OF_LINE))
    assert lines, "objects are written before the line ends"
    captured.sync()
    os.close(descriptor)
    assert len(lines) == 3
    assert all(len(line) < 3000 for line in lines)
