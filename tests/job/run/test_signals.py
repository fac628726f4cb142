"""Runs that are stopped by signals, refused, or ended by a failed engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.rows.read_prompts import read_prompts
from batchinfer.job.run import pipeline
from batchinfer.job.run.run_job import run_job
from batchinfer.job.run.threads import Prefetcher
from batchinfer.process.process import SIGNALS
from batchinfer.requests.requests import PromptRow
from tests.job.fakes import FakeBuild, job
from tests.job.run.outputs import numbered, output, tree


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_stops_the_run_and_the_next_one_resumes(
    tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = numbered(tmp_path)
    signal.signal(number, signal.SIG_DFL)  # under ``nohup``, pytest ignores SIGHUP
    build = FakeBuild(max_num_seqs=4)
    build.before_step = lambda step: os.kill(os.getpid(), number) if step == 25 else None
    spec = job(tmp_path, engine={"order": "input", "max_num_seqs": 4})
    assert run_job(spec, build=build) is ExitCode.INTERRUPTED
    assert capsys.readouterr().err.endswith(
        "stopped; to resume, run the same command again\n"
        f"batchinfer report {tmp_path / 'out'} shows the job's progress\n"
    )
    done = [path.name for path in sorted((tmp_path / "out" / "data").iterdir())]
    assert done == ["part-00000.parquet"]
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    assert output(tmp_path)["generated_text"].to_pylist() == [prompt[:8] for prompt in prompts]
    assert np.array_equal(output(tmp_path)["row_id"], np.arange(25))


def test_stopped_overwrite_says_how_to_resume(
    tmp_path: Path, build: FakeBuild, capsys: pytest.CaptureFixture[str]
) -> None:
    numbered(tmp_path)
    build.before_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None
    assert run_job(job(tmp_path), build=build, overwrite=True, quiet=True) is ExitCode.INTERRUPTED
    error = capsys.readouterr().err
    assert "run the same command without --overwrite" in error
    assert "batchinfer report" not in error  # because of quiet=True


def test_signal_after_success_is_ignored(
    tmp_path: Path, build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(tmp_path)
    write = OutputDir.write

    def write_and_stop(self: OutputDir, final: Path, data: bytes) -> None:
        write(self, final, data)
        if final.name == "_SUCCESS":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(OutputDir, "write", write_and_stop)
    assert run_job(job(tmp_path), build=build) is ExitCode.OK


def test_signal_while_the_model_loads_ends_the_process(tmp_path: Path) -> None:
    numbered(tmp_path)
    run_job(job(tmp_path), build=FakeBuild())
    before = tree(tmp_path)
    script = (
        "import os, signal, sys\n"
        "from batchinfer.job.run.run_job import run_job\n"
        "from batchinfer.process.process import leave_on_signals\n"
        "from batchinfer.job.spec.spec import JobSpec\n"
        "def build(*model, log, **_):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "leave_on_signals()\n"
        "run_job(JobSpec.model_validate_json(sys.argv[1]), build=build, overwrite=True)\n"
    )
    arguments = [sys.executable, "-c", script, job(tmp_path).model_dump_json(by_alias=True)]
    done = subprocess.run(arguments, check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (75, b"stopped; run the same command again\n")
    assert tree(tmp_path) == before


IN_A_TERMINAL = """
import fcntl, os, signal, sys, termios
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.process.process import leave_on_signals, leaves_at_once
from tests.job.fakes import FakeBuild

def close_terminal(step):
    if step == 25:
        os.close(controller)

signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[2] == "nohup" else signal.SIG_DFL)
controller, terminal = os.openpty()
os.setsid()
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for stream in (0, 1, 2):
    os.dup2(terminal, stream)
os.close(terminal)
leave_on_signals()
build = FakeBuild(max_num_seqs=4)
build.before_step = close_terminal
with leaves_at_once():
    sys.exit(run_job(JobSpec.model_validate_json(sys.argv[1]), build=build))
"""


@pytest.mark.parametrize(("how", "code"), [("", 75), ("nohup", 0)])
def test_closed_terminal_stops_the_run_unless_it_ignores_sighup(
    tmp_path: Path, how: str, code: int
) -> None:
    numbered(tmp_path)
    spec = job(tmp_path, engine={"order": "input", "max_num_seqs": 4})
    arguments = [sys.executable, "-c", IN_A_TERMINAL, spec.model_dump_json(by_alias=True), how]
    assert subprocess.run(arguments, check=False).returncode == code
    assert len(list((tmp_path / "out" / "data").iterdir())) == (3 if how else 1)
    assert (tmp_path / "out" / "_SUCCESS").exists() == bool(how)


def test_failed_engine_does_not_wait_for_the_next_window(
    tmp_path: Path, build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(tmp_path)
    leaving, read = threading.Event(), []

    class Watched(Prefetcher[Any]):
        def __exit__(self, *error: Any) -> None:
            leaving.set()
            super().__exit__(*error)

    def reading(*arguments: Any, **options: Any) -> Iterator[list[PromptRow]]:
        for number, batch in enumerate(read_prompts(*arguments, **options)):
            if number < 3:  # a window, and the row that ends it
                yield batch
                continue
            leaving.wait()
            read.append(batch)
            yield batch

    def crash(step: int) -> None:
        raise RuntimeError("bug")

    build.before_step = crash
    monkeypatch.setattr(pipeline, "read_prompts", reading)
    monkeypatch.setattr(pipeline, "Prefetcher", Watched)
    spec = job(tmp_path, engine={"order_window": 10}, output={"rows_per_part": 5})
    with pytest.raises(RuntimeError, match="bug"):
        run_job(spec, build=build)
    assert len(read) <= 1, "one batch may have been made before the processes ended"
