"""``batchinfer report``, and the report at the end of a run: beside the job, never in its way."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli import commands as cli
from batchinfer.cli import program
from batchinfer.errors import ExitCode, install_command
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run.run import run_job
from batchinfer.report import write
from batchinfer.report.write import report_at_end
from tests.job.datasets import strings, write_parquet
from tests.job.fakes import FakeBuild, job
from tests.report.test_page import Tags

EVIL = "<img src=x onerror=alert(1)>\x1b[31m\u202e"


def hostile_job(tmp_path: Path, **sections: Any) -> None:
    """A job with hostile columns, prompts, answers and a failed row."""
    prompts = [f"{row}{EVIL}".encode() for row in range(25)]
    prompts[3] = b"\xff" + EVIL.encode()
    columns = {"prompt": strings([*prompts]), EVIL: [EVIL] * 25, "n": range(25)}
    write_parquet(tmp_path / "in" / "x.parquet", columns)


def batchinfer(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["batchinfer", *arguments])
    for name in ("leave_on_signals", "ignore_signals"):
        monkeypatch.setattr(program, name, lambda: None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_a_run_ends_with_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile_job(tmp_path)
    spec = job(tmp_path, sampling={"max_tokens": 60}, errors={"max_error_rate": 0.1})
    spec = spec.model_copy(update={"name": EVIL})
    assert run_job(spec, build=FakeBuild(), report=report_at_end) is ExitCode.OK
    assert "summary.json, report.html" in capsys.readouterr().out
    html = (tmp_path / "out" / "report.html").read_text()
    tags = Tags(html)
    assert tags.names.isdisjoint({"script", "img"})
    shown = "".join(tags.text)
    assert "<img src=x onerror=alert(1)>[31m" in shown
    assert "Finished with 1 error" in shown
    assert "invalid_utf8" in shown
    assert not set("\x1b\u202e") & set(html)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        ["_SUCCESS", "_batchinfer", "data", "report.html", "stats", "summary.json"]
    )


def test_a_run_without_a_failed_row_has_finished(tmp_path: Path) -> None:
    """Its report is written before ``_SUCCESS``, without which status calls such a job stopped."""
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["a", "b"]})
    assert run_job(job(tmp_path), build=FakeBuild(), report=report_here) is ExitCode.OK
    html = (tmp_path / "out" / "report.html").read_text()
    assert re.findall(r"<h1>(.*?)</h1>", html)[0].startswith(
        '<span class="good">Finished</span>: all'
    )


def report_here(out: OutputDir, tell: Callable[[str], None]) -> bool:
    return bool(write.write_report(out, time.time()))


def test_too_many_errors_are_in_it(tmp_path: Path) -> None:
    hostile_job(tmp_path)
    code = run_job(job(tmp_path), build=FakeBuild(), report=report_here, quiet=True)
    assert code is ExitCode.TOO_MANY_ROW_ERRORS
    html = (tmp_path / "out" / "report.html").read_text()
    assert '<span class="bad">Finished with 1 error</span>: 4.0% of 25 rows, more than' in html


def test_what_is_not_installed_is_named_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile_job(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(write, "find_spec", lambda n: None if n == "vl_convert" else find(n))
    spec = job(tmp_path, errors={"max_error_rate": 1})
    assert run_job(spec, build=FakeBuild(), report=report_at_end) is ExitCode.OK
    printed = capsys.readouterr()
    assert printed.err == (
        "no report: report.html needs the packages altair and vl-convert-python: "
        f"{install_command('report')}\n"
    )
    assert "report.html" not in printed.out
    assert (tmp_path / "out" / "_SUCCESS").exists()
    assert batchinfer(monkeypatch, "report", str(tmp_path / "out")) == ExitCode.USAGE
    assert capsys.readouterr().err.splitlines() == [
        "report.html needs the packages altair and vl-convert-python",
        install_command("report"),
    ]


def test_a_report_that_cannot_be_made_is_a_line(tmp_path: Path) -> None:
    told: list[str] = []
    assert not report_at_end(OutputDir(tmp_path / "nothing"), told.append)
    assert told == [f"no report: {tmp_path}/nothing holds no output of batchinfer"]


@pytest.mark.parametrize("how", ["sys.executable", "timeout"])
def test_a_process_that_fails_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "timeout":
        monkeypatch.setattr(write, "_TIMEOUT_S", 0.01)
    else:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    told: list[str] = []
    assert not report_at_end(OutputDir(tmp_path), told.append)
    assert len(told) == 1
    assert told[0].startswith("no report: ")


def test_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile_job(tmp_path)
    run_job(job(tmp_path, errors={"max_error_rate": 1}), build=FakeBuild(), quiet=True)
    out, elsewhere = tmp_path / "out", tmp_path / "page.html"
    assert not (out / "report.html").exists()
    euros = ("--currency", "EUR")
    assert batchinfer(monkeypatch, "report", str(out), "--price-per-hour", "2.5", *euros) == 0
    assert capsys.readouterr().out == f"{out}/report.html\n"
    assert "at 2.50 EUR an hour" in (out / "report.html").read_text()
    before = (out / "report.html").read_bytes()
    assert batchinfer(monkeypatch, "report", str(out), "--output", str(elsewhere)) == 0
    assert "an hour" not in elsewhere.read_text()
    assert (out / "report.html").read_bytes() == before


def test_the_run_notes_its_job(tmp_path: Path) -> None:
    hostile_job(tmp_path)
    run_job(job(tmp_path, errors={"max_error_rate": 1}), build=FakeBuild(), quiet=True)
    run = json.loads((tmp_path / "out" / "_batchinfer" / "runs" / "run-00001.json").read_bytes())
    assert run["job"]["engine"]["block_size"] == 16
    assert run["job"]["errors"]["max_error_rate"] == 1.0
