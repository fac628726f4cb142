"""Run the commands and files that the README and the documentation show.

They run in order, in a folder laid out like a clone of the repository, with the quickstart's model.
A ``run`` or ``plan`` without ``--limit`` gets a limit. Commands that take too long, or that another
test runs, do not run here; only their options are checked.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from batchinfer.cli import commands as cli
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.yaml import parse_yaml
from tests.docs.pages import PAGES, ROOT, Block, blocks

README, *OTHERS = PAGES
INDEX = ROOT / "docs" / "index.md"
LIMIT = ("--limit", "16")
MODEL = "jobs/quickstart/model"
PROGRAM = ".venv/bin/batchinfer"
PYTHON = ".venv/bin/python"
COMPARED_ELSEWHERE = {
    "make test": ".ci/run",
    "make first-light": "tests/test_first_light.py",
    "make gpu": "tests/test_gpu_benchmark.py",
    "make faults": "tests/faults/__main__.py",
    "make proof": "tests/proof/__main__.py",
}
BASE: dict[str, Any] = {
    "model": MODEL,
    "input": {"path": "x"},
    "sampling": {"max_tokens": 8},
    "output": {"path": "out"},
}

CLIENTS = ("pip install lm-eval", "python -m batchinfer.vllm -m lm_eval run --model vllm ")
"""Starts of commands that `make clients` runs."""

Run = Callable[[str], None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder that looks like a clone of the repository."""
    for name in ("jobs", "configs", "docs", "benchmarks", "Makefile"):
        os.symlink(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a shell line.

    batchinfer runs in this process, so that torch is imported only once.
    """

    def run_line(line: str) -> None:
        words = shlex.split(line, comments=True)
        if not words:
            return
        if words[0] == PROGRAM:
            if words[1] in ("run", "plan") and "--limit" not in words:
                words += LIMIT
            monkeypatch.setattr(sys, "argv", ["batchinfer", *words[1:]])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert not ended.value.code, f"{line}\n{capsys.readouterr().err}"
        elif words[0] == PYTHON:
            command = [sys.executable, *words[1:]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
        elif line.startswith("make demo"):
            for recipe_line in recipe("demo"):
                run_line(recipe_line)
        else:
            _check_only(line)

    return run_line


def recipe(target: str) -> list[str]:
    """Return the commands of a Makefile target."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert found, f"the Makefile has no target {target}"
    return [line.strip() for line in found[1].splitlines()]


def _check_only(line: str) -> None:
    """Check a command without running it: it takes too long, or another test runs it."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["make"]:
        known_to = COMPARED_ELSEWHERE[" ".join(words[:2])]
        assert recipe(words[1])
        assert (ROOT / known_to).exists()
    elif words[0] == PYTHON:
        script = (ROOT / words[1]).read_text()
        missing = [word for word in words if word.startswith("--") and f'"{word}"' not in script]
        assert not missing, f"{line}: {missing}"
    elif not line.startswith(CLIENTS):
        assert words[0] == "batchinfer", f"no test runs or checks: {line}"
        _check_options(line)


def _check_options(line: str) -> None:
    """Check that batchinfer has this command and these options."""
    _, *words = shlex.split(line, comments=True)
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    known = {"--help", "--version", "--install-completion"}
    if words and not words[0].startswith("-"):
        assert words[0] in commands, line
        known |= {name for option in commands[words[0]].params for name in option.opts}
    for word in words:
        if word.startswith("--") and word != "--":
            assert word.partition("=")[0] in known, f"{line}: {word}"


def _run_block(block: Block, run: Run) -> None:
    if block.language == "bash" and not block.text.startswith("#!"):
        for line in block.text.splitlines():
            run(line)
    elif block.language == "text":
        for line in block.text.splitlines():
            _check_only(line)
    elif block.language == "python":
        if not re.search(r"^(import|from) (airflow|dagster)", block.text, re.MULTILINE):
            exec(compile(block.text, block.name, "exec"), {"__name__": "shown"})
    elif block.language == "yaml":
        _check_yaml(block)


def _check_yaml(block: Block) -> None:
    """If a job file is complete, save it for later commands; otherwise check only its keys."""
    data = parse_yaml(block.text, block.name).data
    # The block is empty, or a file for Kubernetes or SkyPilot, which other tests check.
    if data is None or {"apiVersion", "num_nodes"} & data.keys():
        return
    variables = dict.fromkeys(data.get("vars") or {}, "2026-11-20")
    if BASE.keys() <= data.keys():
        named = re.match(r"# (\S+\.yaml)\n", block.text)
        path = Path(named[1] if named else "first.yaml")
        path.write_text(block.text)
        load_job(path, variables=variables)
        return
    merged = {**BASE, **data}
    if data.get("task") in ("score", "embed", "classify"):
        del merged["sampling"]
    if "sampling" in data:
        merged["sampling"] = {**BASE["sampling"], **data["sampling"]}
    Path("part.yaml").write_text(json.dumps(merged))
    load_job(Path("part.yaml"), variables=variables)


def test_commands_of_the_readme_run(folder: Path, run: Run) -> None:
    shown: list[str] = []
    for block in blocks(README):
        _run_block(block, run)
        if not block.language:
            shown += [word for word in block.text.split() if word.startswith("out/")]
    assert shown
    for path in shown:
        assert (folder / path).exists(), f"{README.name} shows {path}, which does not exist"


@pytest.mark.long
def test_commands_of_the_documentation_run(folder: Path, run: Run) -> None:
    for page in (INDEX, *(page for page in OTHERS if page != INDEX)):
        for block in blocks(page):
            _run_block(block, run)


def _commands_in_text() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for command in re.findall(r"`(batchinfer [^`]*)`", text.replace("\n", " ")):
            yield page.stem, command


@pytest.mark.parametrize(("page", "command"), sorted(set(_commands_in_text())))
def test_commands_in_text_exist(page: str, command: str) -> None:
    _check_options(command)


@pytest.mark.parametrize("block", list(blocks(*PAGES)), ids=lambda block: block.name)
def test_every_code_block_is_run_or_checked(block: Block) -> None:
    assert block.language in ("", "bash", "python", "text", "yaml")
    if not block.language:  # a listing of files, not a command
        assert all(re.match(r"(out|OUT)/", line) for line in block.text.splitlines())
