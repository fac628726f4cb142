"""Events in the life of a job that runs from the command line.

A tiny model answers each row with ``TOKENS`` tokens. So a run's own metric of drawn tokens shows
exactly how much it computed again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from batchinfer.cli.commands import app
from tests.job.datasets import write_parquet
from tests.models import make_text_model

TOKENS = 4
ROWS = [f"Row {row} of the first day" for row in range(12)]
EMPTY, LONG = 4, 9
"""Row ids of rows that fail."""
LEFT = 1
"""Number of answer tokens for a prompt that was truncated to the model's length."""
ROWS[EMPTY], ROWS[LONG] = "", "x" * 200
JOB = f"""\
model: {{name: model, max_model_len: 128}}
input: {{path: in}}
prompt: {{template: "{{{{ text }}}}", chat_template: none}}
sampling: {{max_tokens: {TOKENS}, temperature: 0.0, ignore_eos: true}}
engine: {{num_kv_blocks: 512, deterministic: true}}
output: {{path: out, rows_per_part: 5}}
errors: {{max_error_rate: 0.5}}
"""
QUIET = ("--quiet", "--no-report")


class Place:
    """A folder with a job, its model, its input and its output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics"

    def write(self, texts: list[str], name: str = "b.parquet", folder: str = "in") -> None:
        write_parquet(self.folder / folder / name, {"text": texts})

    def command(self, *options: str) -> list[str]:
        job = str(self.folder / "job.yaml")
        return [sys.executable, "-m", "batchinfer", "run", job, *QUIET, *options]

    def run(self, *options: str) -> int:
        """Run the job in a new process; return the number of tokens that it drew."""
        self.metrics.unlink(missing_ok=True)
        command = self.command("--metrics", str(self.metrics), *options)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return self.drawn()

    def drawn(self) -> int:
        """Return the number of tokens that the latest run drew.

        A token counts when the next one is computed from it, or when it ends its row. So each token
        counts only once, even if runs are interrupted.
        """
        events = self.metrics.read_text()
        drawn = re.search(r"^batchinfer_output_tokens_total{.*} (.*)$", events, re.MULTILINE)
        return 0 if drawn is None else int(float(drawn[1]))

    def here(self, *options: str) -> None:
        """Run the job in this process, which is faster."""
        arguments = ["run", str(self.folder / "job.yaml"), *QUIET, *options]
        assert CliRunner().invoke(app, arguments).exit_code == 0

    def drawn_here(self, *options: str) -> int:
        """Do the same as ``run``, but in this process."""
        self.metrics.unlink(missing_ok=True)
        self.here("--metrics", str(self.metrics), *options)
        return self.drawn()

    def data(self, out: str = "out") -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / out / "data").iterdir()}

    def check_as_fresh(self, *options: str, out: str = "out") -> None:
        """Check that an output equals that of a single undisturbed run."""
        self.here("--output", str(self.folder / "fresh"), *options)
        assert self.data(out) == self.data("fresh")


@pytest.fixture(scope="module")
def first_day(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("first") / "project")
    place.folder.mkdir()
    make_text_model(place.folder / "model", max_position_embeddings=4096)
    (place.folder / "job.yaml").write_text(JOB)
    place.write(ROWS)
    place.here()
    return place


@pytest.fixture
def place(first_day: Place, tmp_path: Path) -> Place:
    """Return a copy of the job after its first day."""
    return Place(shutil.copytree(first_day.folder, tmp_path / "project"))


def touch(place: Place) -> None:
    for path in place.folder.rglob("*"):
        os.utime(path, (1e9, 1e9))


def move(place: Place) -> None:
    place.folder = place.folder.rename(place.folder.with_name("elsewhere"))


@pytest.mark.parametrize("change", [touch, move])
def test_touched_or_moved_files_keep_the_job(place: Place, change: Callable[[Place], None]) -> None:
    before = place.data()
    change(place)
    assert place.run() == 0
    assert place.data() == before


def append(place: Place) -> None:
    place.write([*ROWS, "one more", "and another"])


def add_a_file_that_sorts_first(place: Place) -> None:
    place.write(["of a new file"], "a.parquet")


def repair(place: Place) -> None:
    place.write([*ROWS[:EMPTY], "corrected", *ROWS[EMPTY + 1 :]])


def nothing(place: Place) -> None:
    pass


@pytest.mark.long
@pytest.mark.parametrize(
    ("edit", "options", "drawn"),
    [
        (append, ["--update"], 2 * TOKENS),
        (add_a_file_that_sorts_first, ["--update"], TOKENS),
        (repair, ["--retry-errors"], TOKENS),
        (repair, ["--update"], TOKENS),
        (nothing, ["--retry-errors", "--set", "prompt.on_too_long=truncate_left"], LEFT),
        (nothing, ["--update", "--set", "output.rows_per_part=3"], 0),
    ],
)
def test_update_runs_only_new_rows(
    place: Place, edit: Callable[[Place], None], options: list[str], drawn: int
) -> None:
    edit(place)
    assert place.drawn_here(*options) == drawn
    keys = [option for option in options if option not in ("--update", "--retry-errors")]
    place.check_as_fresh(*keys)
    assert place.drawn_here(*keys) == 0


@pytest.mark.long
def test_update_after_limit_runs_the_other_rows(place: Place) -> None:
    out = ("--output", str(place.folder / "tried"))
    place.here(*out, "--limit", "7")
    assert place.run(*out, "--update") == (len(ROWS) - 7 - 1) * TOKENS
    assert place.data("tried") == place.data(), "reused rows equal computed rows"


@pytest.mark.long
def test_reuse_of_the_previous_days_output(place: Place) -> None:
    place.write([*ROWS[6:9], "of the second day", *ROWS[:3]], folder="second")
    second = ("--set", f"input.path={place.folder / 'second'}")
    out = ("--output", str(place.folder / "next"))
    assert place.run(*second, *out, "--reuse", str(place.folder / "out")) == TOKENS
    place.check_as_fresh(*second, out="next")


AT_LENGTH = (
    *("--limit", "3", "--set", "model.max_model_len=4096"),
    *("--set", "sampling.temperature=1.0", "--set", "sampling.max_tokens=2000"),
)


@pytest.mark.long
def test_long_answers_resume_after_ctrl_c(place: Place) -> None:
    out = place.folder / "long"
    command = place.command(*AT_LENGTH, "--output", str(out), "--metrics", str(place.metrics))
    run = subprocess.Popen(command, start_new_session=True)
    try:
        while not tells_of_tokens(out):
            assert run.poll() is None, "it ended before it could be interrupted"
            time.sleep(0.02)
        run.send_signal(signal.SIGINT)
        assert run.wait() == 75
    finally:
        run.kill()
        run.wait()
    drawn = place.drawn()
    assert 0 < drawn < 3 * 2000
    assert [*out.glob("_batchinfer/tokens/*.parquet")]
    assert place.run(*AT_LENGTH, "--output", str(out)) == 3 * 2000 - drawn
    assert json.loads((out / "summary.json").read_text())["tokens"]["lost"] == 0
    place.check_as_fresh(*AT_LENGTH, out="long")


def tells_of_tokens(out: Path) -> bool:
    """Return True if the live files of a running job show that it has drawn tokens."""
    events: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in out.glob("_batchinfer/live/*.json")
    ]
    return any(one["output_tokens"] for one in events)
