"""``batchinfer report``, and the report that a run writes when it ends."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from batchinfer.cli.commands import app
from batchinfer.errors import ExitCode
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run.run_job import run_job
from batchinfer.report import write
from batchinfer.report.write import report_at_end
from tests.job.datasets import strings, write_parquet
from tests.job.fakes import FakeBuild, job
from tests.report.test_page import Tree

EVIL = "<img src=x onerror=alert(1)>\x1b[31m\u202e"


def hostile_job(tmp_path: Path, **sections: Any) -> None:
    """Run a job with hostile columns, prompts and answers, and one failed row."""
    prompts = [f"{row}{EVIL}".encode() for row in range(25)]
    prompts[3] = b"\xff" + EVIL.encode()
    columns = {"prompt": strings([*prompts]), EVIL: [EVIL] * 25, "n": range(25)}
    write_parquet(tmp_path / "in" / "x.parquet", columns)


def test_run_ends_with_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile_job(tmp_path)
    spec = job(tmp_path, sampling={"max_tokens": 60}, errors={"max_error_rate": 0.1})
    spec = spec.model_copy(update={"name": EVIL})
    assert run_job(spec, build=FakeBuild(), report=report_at_end) is ExitCode.OK
    assert "summary.json, report.html" in capsys.readouterr().out
    html = (tmp_path / "out" / "report.html").read_text()
    tree = Tree(html)
    assert {tag for tag, _ in tree.vocabulary}.isdisjoint({"script", "img"})
    shown = "".join(tree.text)
    assert "<img src=x onerror=alert(1)>[31m" in shown
    assert "Finished with 1 error" in shown
    assert "invalid_utf8" in shown
    assert not set("\x1b\u202e") & set(html)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        ["_SUCCESS", "_batchinfer", "data", "report.html", "stats", "summary.json"]
    )


def test_report_of_a_run_without_errors_says_finished(tmp_path: Path) -> None:
    """The run writes its report before ``_SUCCESS``, when the status would still be ``stopped``."""
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["a", "b"]})
    assert run_job(job(tmp_path), build=FakeBuild(), report=report_at_end) is ExitCode.OK
    html = (tmp_path / "out" / "report.html").read_text()
    assert re.findall(r"<h1>(.*?)</h1>", html)[0].startswith(
        '<span class="good">Finished</span>: all'
    )


def test_report_says_that_too_many_rows_failed(tmp_path: Path) -> None:
    hostile_job(tmp_path)
    code = run_job(job(tmp_path), build=FakeBuild(), report=report_at_end, quiet=True)
    assert code is ExitCode.TOO_MANY_ROW_ERRORS
    html = (tmp_path / "out" / "report.html").read_text()
    assert '<span class="bad">Finished with 1 error</span>: 4.0% of 25 rows, more than' in html


def test_missing_report_is_one_line_of_output(tmp_path: Path) -> None:
    lines: list[str] = []
    assert not report_at_end(OutputDir(tmp_path / "nothing"), lines.append)
    assert lines == [f"no report: {tmp_path}/nothing holds no batchinfer output"]


@pytest.mark.parametrize(
    ("error", "free", "says"),
    [
        (MemoryError(), None, "it ran out of memory"),
        (KeyError(12), None, "KeyError: 12"),
        (
            RuntimeError("#"),
            1 << 20,
            r"RuntimeError: # \(`ulimit -v` allows .* of address space, of which .* are left\)",
        ),
    ],
)
def test_bug_in_the_report_does_not_fail_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    free: int | None,
    says: str,
) -> None:
    def fail(*_: object) -> None:
        if free is not None:
            limit = psutil.Process().memory_info().vms + free
            monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        raise error

    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["a", "b"]})
    monkeypatch.setattr(write, "from_output", fail)
    assert run_job(job(tmp_path), build=FakeBuild(), report=report_at_end) is ExitCode.OK
    printed = capsys.readouterr()
    assert re.fullmatch(f"no report: {says}\n", printed.err)
    assert "report.html" not in printed.out
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_report_command(tmp_path: Path) -> None:
    hostile_job(tmp_path)
    run_job(job(tmp_path, errors={"max_error_rate": 1}), build=FakeBuild(), quiet=True)
    out, elsewhere = tmp_path / "out", tmp_path / "page.html"
    assert not (out / "report.html").exists()
    euros = ("--currency", "EUR")
    done = CliRunner().invoke(app, ["report", str(out), "--price-per-hour", "2.5", *euros])
    assert done.stdout == f"{out}/report.html\n"
    assert "at 2.50 EUR an hour" in (out / "report.html").read_text()
    before = (out / "report.html").read_bytes()
    done = CliRunner().invoke(app, ["report", str(out), "--output", str(elsewhere)])
    assert done.exit_code == 0
    assert "an hour" not in elsewhere.read_text()
    assert (out / "report.html").read_bytes() == before
