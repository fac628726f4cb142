"""``status`` reads only files, while a job runs and afterwards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchinfer.console.table import plain
from batchinfer.errors import ExitCode, StorageError
from batchinfer.job.output import part_writer
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run import pipeline
from batchinfer.job.run.run_job import run_job
from batchinfer.job.stats.first_errors import error_lines
from batchinfer.job.stats.latest_runs import SILENT_S
from batchinfer.job.stats.live import LiveFile
from batchinfer.job.stats.status import Status, read_status
from batchinfer.job.storage.local_lock import HOLDER
from tests.job.datasets import write_parquet
from tests.job.fakes import AtOnce, job
from tests.job.output.test_resume import Build, stop_at

ONE_PART: dict[str, Any] = {"output": {"rows_per_part": 100}, "errors": {"max_error_rate": 1}}


def dataset(tmp_path: Path) -> None:
    prompts = [f"{row} asks" if row != 3 else "" for row in range(40)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts})


def status(tmp_path: Path, later_s: float = 0.0) -> Status:
    return read_status(OutputDir(tmp_path / "out"), time.time() + later_s)


def test_status_of_a_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset(tmp_path)
    monkeypatch.setattr(part_writer, "FLUSH_ROWS", 1)
    monkeypatch.setattr(pipeline, "BackgroundConsumer", AtOnce)
    monkeypatch.setattr(LiveFile, "write", lambda self: None)  # ``status`` must need only files
    seen: list[Status] = []
    build = Build(lambda step: seen.append(status(tmp_path)))
    spec = job(tmp_path, errors={"max_error_rate": 1}, engine={"order": "input"})
    assert run_job(spec, build=build, quiet=True) is ExitCode.OK
    assert {found.state for found in seen} == {"running"}
    done = [found.rows_done for found in seen]
    assert done == sorted(done)
    last = seen[-1]
    assert last.rows_done > 20
    assert last.rows_error == 1
    assert last.parts_done >= 2
    assert last.rows_per_s
    assert last.eta_s == pytest.approx((40 - last.rows_done) / last.rows_per_s)
    assert last.pool_use is not None
    assert 0 < last.pool_use < 1
    shown = "\n".join(last.lines())
    assert "about" in shown
    assert "in the latest of" not in shown, "there is only one run"


def test_status_of_a_stopped_job(tmp_path: Path) -> None:
    dataset(tmp_path)
    run_job(job(tmp_path, **ONE_PART), build=Build(stop_at(40)), quiet=True)
    found = status(tmp_path)
    assert (found.state, found.parts_done, found.rows_error) == ("stopped", 0, 1)
    assert 0 < found.rows_done < 40
    assert found.eta_s is found.pool_use is None
    assert next(found.lines()) == "state    stopped"


def test_status_shows_why_a_job_failed(tmp_path: Path) -> None:
    dataset(tmp_path)
    steps = tmp_path / "out" / "_batchinfer" / "steps"

    def put_a_file_there(step: int) -> None:
        if step == 30:
            shutil.rmtree(steps, ignore_errors=True)
            steps.touch()

    with pytest.raises(StorageError):
        run_job(job(tmp_path, **ONE_PART), build=Build(put_a_file_there), quiet=True)
    found = status(tmp_path)
    assert found.state == "failed"
    assert found.error is not None
    assert f"cannot write {steps}" in found.error


def test_status_of_a_job_killed_on_another_machine(tmp_path: Path) -> None:
    dataset(tmp_path)
    holder = tmp_path / "out" / "_batchinfer" / HOLDER
    seen: list[Status] = []

    def look(step: int) -> None:
        if step == 0:
            holder.write_text(json.dumps({**json.loads(holder.read_text()), "host": "another"}))
            seen.extend([status(tmp_path), status(tmp_path, later_s=SILENT_S + 1)])

    run_job(job(tmp_path, **ONE_PART), build=Build(look), quiet=True)
    assert [found.state for found in seen] == ["running", "stopped"]


def test_status_of_a_job_killed_on_this_machine(tmp_path: Path) -> None:
    dataset(tmp_path)
    holder = tmp_path / "out" / "_batchinfer" / HOLDER
    seen: list[str] = []

    def look(step: int) -> None:
        if step == 0:
            facts = json.loads(holder.read_text())
            for change in ({}, {"pid": ended_process()}, {"started": 1.0}, {"host": "another"}):
                holder.write_text(json.dumps({**facts, **change}))
                seen.append(status(tmp_path).state)

    run_job(job(tmp_path, **ONE_PART), build=Build(look), quiet=True)
    assert seen == ["running", "stopped", "stopped", "running"]


def test_status_is_running_while_the_model_loads(tmp_path: Path) -> None:
    dataset(tmp_path)
    seen: list[Status] = []

    def build(*arguments: Any, **keywords: Any) -> Any:
        seen.append(status(tmp_path))
        return Build(stop_at(10) if len(seen) == 1 else lambda step: None)(*arguments, **keywords)

    spec = job(tmp_path, **ONE_PART)
    assert run_job(spec, build=build, quiet=True) is ExitCode.INTERRUPTED
    assert status(tmp_path).state == "stopped"
    assert run_job(spec, build=build, quiet=True) is ExitCode.OK
    assert [found.state for found in seen] == ["running", "running"]
    assert seen[0].rows_done == 0
    assert seen[1].eta_s is seen[1].pool_use is None, "the live file of the previous run is ignored"


def test_status_is_running_after_a_clock_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset(tmp_path)
    seen: list[str] = []

    def look(step: int) -> None:
        if step == 0:
            boot_time = psutil._pslinux.boot_time
            later = boot_time() + 3600.5
            with monkeypatch.context() as patch:
                patch.setattr(psutil._pslinux, "boot_time", lambda: later)
                seen.append(status(tmp_path).state)

    run_job(job(tmp_path, **ONE_PART), build=Build(look), quiet=True)
    assert seen == ["running"]


def ended_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_status_of_a_run_killed_before_success_is_written(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["one", "two"]})
    assert run_job(job(tmp_path), build=Build(), quiet=True) is ExitCode.OK
    (tmp_path / "out" / "_SUCCESS").unlink()
    assert status(tmp_path).state == "stopped"


@pytest.mark.parametrize(("limit", "state"), [(1, "finished"), (0.01, "finished_with_errors")])
def test_status_of_a_finished_job(tmp_path: Path, limit: float, state: str) -> None:
    dataset(tmp_path)
    run_job(job(tmp_path, errors={"max_error_rate": limit}), build=Build(), quiet=True)
    found = status(tmp_path)
    assert (found.state, found.rows_done, found.rows_error) == (state, 40, 1)
    assert (found.parts_done, found.parts_total, found.runs) == (4, 4, 1)
    assert list(found.lines())[:4] == [
        f"state    {state.replace('_', ' ')}",
        "rows     40 of 40 (100%), 1 failed",
        "errors   empty_prompt 1: row 3",
        "parts    4 of 4",
    ]
    assert found.data()["rows_total"] == 40


def test_status_ignores_damaged_files(tmp_path: Path) -> None:
    dataset(tmp_path)
    run_job(job(tmp_path, **ONE_PART), build=Build(stop_at(40)), quiet=True)
    state = tmp_path / "out" / "_batchinfer"
    for path in (*(state / "segments").iterdir(), *(state / "runs").iterdir()):
        path.write_bytes(b"zork")
    found = status(tmp_path)
    assert (found.state, found.rows_done, found.runs) == ("stopped", 0, 0)


def test_status_names_first_errors_by_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, ids = ["", "b", *[" "] * 6], [f"doc-{at}" for at in range(8)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts, "name": ids})
    spec = job(
        tmp_path,
        input={"id_column": "name"},
        output={"rows_per_part": 3, "rename": {"name": "called"}},
        errors={"max_error_rate": 1},
    )
    assert run_job(spec, build=Build()) is ExitCode.OK

    named = "empty_prompt 7: row 0 (doc-0), row 2 (doc-2), row 3 (doc-3)"
    (line,) = [line for line in status(tmp_path).lines() if "doc-0" in line]
    assert named in line
    assert line.endswith(", and 2 more")
    assert named in " ".join(capsys.readouterr().out.split())


def test_error_lines_list_codes_and_rows() -> None:
    found = [("too_long", 7, "a"), ("empty", 1234, None), ("too_long", 9, "b")]
    errors = [{"code": code, "row_id": row, "id": known_as} for code, row, known_as in found]
    codes = {"too_long": 2000, **dict.fromkeys("abc", 9), "empty": 1, "x": 1, "y": 3}
    assert list(plain(error_lines(codes, errors))) == [
        "errors   too_long 2,000: row 7 (a), row 9 (b), and 1,998 more",
        *(f"errors   {code} 9" for code in "abc"),
        "errors   empty 1: row 1234",
        "errors   4 of 2 other codes",
    ]
    assert list(error_lines({}, ())) == []
