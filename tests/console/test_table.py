"""Tables on a terminal and plain lines elsewhere; untrusted text cannot control either."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from batchinfer.console.table import SummaryLine, plain, render_table
from batchinfer.errors import ExitCode
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_job import run_job
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job

FACTS = [
    SummaryLine("rows", "5 of 10 (50%)", ", 1 failed", share=0.5),
    SummaryLine("waste", "1.0% of the used blocks", " (or [bold]70%[/bold])", tone="good"),
    SummaryLine("errors", "empty 1", ": row 3"),
    SummaryLine("state", "finished"),
]
PLAIN = """\
rows     5 of 10 (50%), 1 failed
waste    1.0% of the used blocks (or [bold]70%[/bold])
errors   empty 1: row 3
state    finished"""
COLOR = re.compile("\x1b\\[[0-9;]*m")


class Terminal(io.TextIOWrapper):
    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stdout a terminal of 80 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


def test_facts_are_plain_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\n".join(plain(FACTS)) == PLAIN
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert render_table("title", FACTS) == PLAIN
    assert render_table("title", FACTS, ["another line"]) == "another line"
    monkeypatch.setattr(sys, "stdout", None)
    assert render_table("title", FACTS) == PLAIN


@pytest.mark.parametrize(("encoding", "term"), [("ascii", "xterm"), ("utf-8", "dumb")])
def test_facts_are_plain_lines_on_a_simple_terminal(
    monkeypatch: pytest.MonkeyPatch, encoding: str, term: str
) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal(encoding))
    monkeypatch.setenv("TERM", term)
    assert render_table("title", FACTS) == PLAIN


def test_facts_are_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    text = render_table("title", FACTS)
    assert COLOR.search(text)
    lines = COLOR.sub("", text).splitlines()
    assert max(map(len, lines)) <= 80
    assert "title" in lines[0]
    assert "━━━━━━━━──────── 5 of 10 (50%)" in lines[1]
    assert re.search(r"\s1 failed\s", lines[1])
    assert "or [bold]70%[/bold]" in lines[2]
    assert re.search(r"empty 1 +row 3 ", lines[3])
    assert len(lines) == 6


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    codes = ";".join(found[2:-1] for found in COLOR.findall(render_table("title", FACTS)))
    assert set(codes.split(";")) <= {"0", "1", "2"}  # bold and dim are not colors


def test_names_cannot_control_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    monkeypatch.chdir(tmp_path)
    evil = Path("\x1b[2J[red]\u202e")
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["one", "two"]})
    spec = job(tmp_path, output={"path": str(evil)})
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    (evil / "data" / "\x1b[31m.parquet").write_bytes(b"")
    found = verify(OutputDir(evil))
    print(render_table("verify", found.facts(), found.lines()))
    terminal.flush()
    said = terminal.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "job ended" in said
    assert "\\x1b[2J[red]" in re.sub(r"[│\s]", "", COLOR.sub("", said))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", COLOR.sub("", said))
    assert "\x1b[31m.parquet" not in said


def test_json_summary_is_alone_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["one", "two"]})
    for _ in range(2):  # the second run has nothing to do
        assert run_job(job(tmp_path), build=FakeBuild(), as_json=True) is ExitCode.OK
        summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
        printed = capsys.readouterr()
        assert json.loads(printed.out) == summary
    assert printed.err.startswith("nothing to do: ")
