"""Random edits of inputs and jobs; an updated output must equal the output of a new job."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from batchinfer.errors import ExitCode
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.faults.violation import ViolationError
from tests.job.datasets import write_parquet
from tests.job.fakes import TellingBuild, drawn, echo, job
from tests.job.output.test_resume import stop_at

Key = tuple[str, int, tuple[str, int] | None]
"""What a row's answer depends on: prompt, ``max_tokens``, and the key of any random numbers."""


@dataclass(frozen=True)
class Row:
    id: int
    prompt: str


@dataclass(frozen=True)
class Plan:
    """A job and its input."""

    files: dict[str, list[Row]]
    """Rows, keyed by file name; prompts may repeat, ids do not."""
    rows_per_part: int = 4
    max_tokens: int = 6
    temperature: float = 0.0
    drawn_by: str = "position"
    limit: int | None = None

    @property
    def rows(self) -> list[Row]:
        """Rows that the job computes."""
        rows = [row for name in sorted(self.files) for row in self.files[name]]
        return rows if self.limit is None else rows[: self.limit]

    def keys(self) -> list[Key]:
        """Return the key of each row in order."""
        return [
            (row.prompt, self.max_tokens, self._stream(at, row)) for at, row in enumerate(self.rows)
        ]

    def _stream(self, at: int, row: Row) -> tuple[str, int] | None:
        if self.temperature == 0:
            return None
        return (self.drawn_by, row.id if self.drawn_by == "id" else at)

    def spec(self, folder: Path, out: str) -> JobSpec:
        """Write the files to ``folder``, and return the job."""
        shutil.rmtree(folder / "in", ignore_errors=True)
        for name, rows in self.files.items():
            columns = {
                "id": pa.array([row.id for row in rows], pa.int64()),
                "prompt": pa.array([row.prompt for row in rows], pa.string()),
            }
            write_parquet(folder / "in" / f"{name}.parquet", columns)
        sampling = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        sampling["key"] = self.drawn_by
        output = {"path": str(folder / out), "rows_per_part": self.rows_per_part}
        chosen = {"limit": self.limit, "id_column": "id"}
        return job(folder, input=chosen, sampling=sampling, output=output)


@dataclass
class Editor:
    """Edits plans at random."""

    random: Random
    made: int = field(default=0)

    def new_rows(self, count: int) -> list[Row]:
        """Return rows with new prompts."""
        self.made += count
        return [Row(at, f"p{at:03d}") for at in range(self.made - count, self.made)]

    def row_like(self, row: Row) -> Row:
        """Return a new row with the prompt of another row."""
        return replace(self.new_rows(1)[0], prompt=row.prompt)

    def edited(self, plan: Plan) -> Plan:
        """Return a copy of a plan with at most one edit."""
        files = {name: list(rows) for name, rows in plan.files.items()}
        name, other = (self.random.choice(sorted(files)) for _ in range(2))
        rows = files[name]
        at = self.random.randrange(len(rows)) if rows else 0
        free = [unused for unused in ("b", "d", "e", "f") if unused not in files]
        edits: dict[str, Callable[[], object]] = {
            "insert": lambda: rows.insert(at, *self.new_rows(1)),
            "append": lambda: rows.extend(self.new_rows(3)),
            "repeat": lambda: rows and rows.insert(0, self.row_like(rows[at])),
            "delete": lambda: rows and rows.pop(at),
            "replace": lambda: rows and rows.__setitem__(at, *self.new_rows(1)),
            "shuffle": lambda: self.random.shuffle(rows),
            "add a file": lambda: free and files.update({free[0]: self.new_rows(2)}),
            "drop a file": lambda: len(files) > 1 and files.pop(name),
            "rename a file": lambda: free and files.update({free[-1]: files.pop(name)}),
            "swap files": lambda: files.update({name: files[other], other: rows}),
        }
        keys: dict[str, Any] = {
            "rows_per_part": self.random.choice([3, 4, 5, 50]),
            "max_tokens": self.random.choice([5, 6]),
            "temperature": self.random.choice([0.0, 1.0]),
            "drawn_by": self.random.choice(["position", "id"]),
            "limit": self.random.choice([None, None, 5, 9]),
        }
        choice = self.random.choice([*edits, *keys])
        if choice in keys:
            return replace(plan, **{choice: keys[choice]})
        edits[choice]()
        return replace(plan, files=files)


def update_at_random(folder: Path, random: Random, rounds: int) -> int:
    """Run a job, then edit and update it ``rounds`` times.

    Returns:
        The number of rows that updates copied.

    Raises:
        ViolationError: an update computed other rows than those with new keys, or an output differs
            from that of a new job.
    """
    editor = Editor(random)
    plan = Plan({"a": editor.new_rows(6), "c": editor.new_rows(5)})
    held = set(plan.keys())
    _run(plan, folder, "out")
    num_kept = 0
    for _ in range(rounds):
        for _ in range(random.randint(1, 3)):
            plan = editor.edited(plan)
        is_stopped = random.random() < 0.2
        ran = _run(plan, folder, "out", stop_after=random.randint(1, 6)) if is_stopped else set()
        ran |= _run(plan, folder, "out")
        keys = plan.keys()
        new = sorted({key for key in keys if key not in held})
        if sorted(keys[at] for at in ran) != new:
            raise ViolationError(f"rows {sorted(ran)} ran, but the new keys are {new}")
        num_kept += sum(key in held for key in keys)
        held = set(keys)
        _run(plan, folder, "fresh")
        fresh, updated = (_data(folder / out) for out in ("fresh", "out"))
        if fresh != updated:
            raise ViolationError(f"the output of {plan} differs from a new output")
        shutil.rmtree(folder / "fresh")
    return num_kept


def _run(plan: Plan, folder: Path, out: str, stop_after: int | None = None) -> set[int]:
    """Update the output; return the ids of the rows that the engine computed."""
    build = TellingBuild(max_num_seqs=4, next_token=drawn if plan.temperature else echo)
    if stop_after is not None:
        build.before_step = stop_at(stop_after)
    code = run_job(plan.spec(folder, out), build=build, quiet=True, update=True)
    if code not in (ExitCode.OK, ExitCode.INTERRUPTED if stop_after else ExitCode.OK):
        raise ViolationError(f"exit {code}")
    return set(build.ran)


def _data(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "data").iterdir())}
