"""Commands that fail, and their messages; they run in this process."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from batchinfer.cli import commands as cli
from batchinfer.job.run import run_job as run_module
from batchinfer.process.process import SIGNALS
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild

JOB = """\
model: {name: NAME}
input: {path: in.parquet}
prompt: {column: prompt, chat_template: none}
sampling: {max_tokens: 8}
output: {path: out}
"""
"""A job for the fake engine that succeeds if ``in.parquet`` exists."""

_VARIES = (
    (r"process \d+ on \S+ \(boot \S+\)", "process P on HOST (boot B)"),
    (r"has only [0-9,.]+ MiB", "has only N MiB"),
    (r"transformers \d+\.\d+\.\d+", "transformers VERSION"),
    # messages of other libraries
    (r"(be read as Parquet|group \d+ cannot be read|not valid YAML|the hub): .*", r"\1: REASON"),
    (
        r"(Jinja2 template \(line \d+\)|cannot be loaded|config.json cannot be read): .*",
        r"\1: REASON",
    ),
)
"""Patterns of texts that differ between machines or versions, and their replacements."""


@dataclass
class Place:
    """The current folder of a failing command, and temporary changes to this process."""

    folder: Path
    patch: pytest.MonkeyPatch
    model: Path
    """The folder of a tiny model."""

    def job(self, text: str = JOB, **replaced: str) -> str:
        """Write a job file after replacing texts in it; return its name."""
        for old, new in replaced.items():
            assert old in text
            text = text.replace(old, new)
        (self.folder / "job.yaml").write_text(text.replace("NAME", "echo"), encoding="utf-8")
        return "job.yaml"

    def data(self, name: str = "in.parquet", **columns: object) -> Path:
        """Write a Parquet file of ``columns``, by default three prompts."""
        return write_parquet(self.folder / name, dict(columns) or {"prompt": ["a", "b", "c"]})

    def run(self, *options: str) -> int:
        """Run the job without its slow report; return the exit code."""
        return print_of("run", "job.yaml", "--quiet", "--no-report", *options)[0]

    def finished(self) -> Path:
        """Write and run a job; return its output."""
        self.job()
        self.data()
        assert self.run() == 0
        return self.folder / "out"


Failure = Callable[[Place], list[str]]
"""Prepares a failure, and returns the command that fails."""


def print_of(*arguments: str) -> tuple[int, str]:
    """Run the program in this process; return its exit code and everything it prints."""
    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(printed):
        patch.setattr(sys, "argv", ["batchinfer", *arguments])
        with pytest.raises(SystemExit) as caught, _signals_kept():
            cli.main()
    return int(caught.value.code or 0), printed.getvalue()


def failed(failure: Failure, model: Path) -> tuple[int, str]:
    """Return the exit code and message of a failure; its folder is shown as ``/here``."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(os.path.realpath(name))
        patch.chdir(folder)
        patch.setenv("COLUMNS", "100")
        patch.setattr(run_module, "_default_builder", lambda: FakeBuild())
        try:
            code, text = print_of(*failure(Place(folder, patch, model)))
        finally:
            os.chdir(before)
    text = text.replace(str(folder), "/here").replace(str(model), "/model")
    for pattern, stand_in in _VARIES:
        text = re.sub(pattern, stand_in, text)
    return code, text


@contextmanager
def _signals_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
