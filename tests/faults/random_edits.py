"""Inputs and jobs edited at random, updated in place, and compared with outputs made afresh."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from batchinfer.errors import ExitCode
from batchinfer.job.run.run import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.faults.violation import ViolationError
from tests.job.datasets import write_parquet
from tests.job.fakes import TellingBuild, drawn, echo, job
from tests.job.output.test_resume import stop_at

Key = tuple[str, int, int | None]
"""What decides a row's answer: its prompt, ``max_tokens``, and its place if it is drawn."""


@dataclass(frozen=True)
class Plan:
    """A job and its input."""

    files: dict[str, list[str]]
    """Prompts of each file, no two alike, in the order of the files' names."""
    rows_per_part: int = 4
    max_tokens: int = 6
    temperature: float = 0.0
    limit: int | None = None

    @property
    def prompts(self) -> list[str]:
        """Of the rows that are run."""
        found = [prompt for name in sorted(self.files) for prompt in self.files[name]]
        return found if self.limit is None else found[: self.limit]

    def keys(self) -> list[Key]:
        """Of each row, in order."""
        drawn_at = self.temperature > 0
        return [
            (prompt, self.max_tokens, at if drawn_at else None)
            for at, prompt in enumerate(self.prompts)
        ]

    def spec(self, folder: Path, out: str) -> JobSpec:
        """The job, over files that are written there."""
        shutil.rmtree(folder / "in", ignore_errors=True)
        for name, prompts in self.files.items():
            write_parquet(folder / "in" / f"{name}.parquet", {"prompt": prompts})
        sampling = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        output = {"path": str(folder / out), "rows_per_part": self.rows_per_part}
        return job(folder, input={"limit": self.limit}, sampling=sampling, output=output)


@dataclass
class Editor:
    """Edits plans at random; every prompt that it makes is a new one."""

    random: Random
    made: int = field(default=0)

    def new_rows(self, count: int) -> list[str]:
        self.made += count
        return [f"p{at:03d}" for at in range(self.made - count, self.made)]

    def edited(self, plan: Plan) -> Plan:
        """A plan that differs in one place, or in none."""
        files = {name: list(prompts) for name, prompts in plan.files.items()}
        prompts = files[self.random.choice(sorted(files))]
        at = self.random.randrange(len(prompts)) if prompts else 0
        edits: dict[str, Any] = {
            "insert": lambda: prompts.insert(at, *self.new_rows(1)),
            "append": lambda: prompts.extend(self.new_rows(3)),
            "delete": lambda: prompts and len(prompts) > 1 and prompts.pop(at),
            "mend": lambda: prompts and prompts.__setitem__(at, *self.new_rows(1)),
            "shuffle": lambda: self.random.shuffle(prompts),
            "add a file": lambda: files.update({f"f{self.random.randrange(9)}x": self.new_rows(2)}),
            "rename a file": lambda: files.update({"e": files.pop(sorted(files)[-1])}),
        }
        keys: dict[str, Any] = {
            "rows_per_part": self.random.choice([3, 4, 5, 50]),
            "max_tokens": self.random.choice([5, 6]),
            "temperature": self.random.choice([0.0, 1.0]),
            "limit": self.random.choice([None, None, 5, 9]),
        }
        choice = self.random.choice([*edits, *keys])
        if choice in keys:
            return replace(plan, **{choice: keys[choice]})
        edits[choice]()
        return replace(plan, files=files)


def update_at_random(folder: Path, random: Random, rounds: int) -> int:
    """Run a job, then edit and update it so many times.

    Returns:
        How many rows were taken over.

    Raises:
        ViolationError: other rows were run than those whose keys are new, or an output differs
            from one made afresh.
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
        new = {at for at, key in enumerate(keys) if key not in held}
        if ran != new:
            raise ViolationError(f"rows {sorted(ran)} ran, those that are new are {sorted(new)}")
        num_kept += len(keys) - len(new)
        held = set(keys)
        _run(plan, folder, "fresh")
        fresh, found = (_data(folder / out) for out in ("fresh", "out"))
        if fresh != found:
            raise ViolationError(f"the output of {plan} is not as a fresh one")
        shutil.rmtree(folder / "fresh")
    return num_kept


def _run(plan: Plan, folder: Path, out: str, stop_after: int | None = None) -> set[int]:
    """Update the output; the rows that the engine ran."""
    build = TellingBuild(max_num_seqs=4, next_token=drawn if plan.temperature else echo)
    if stop_after is not None:
        build.before_step = stop_at(stop_after)
    code = run_job(plan.spec(folder, out), build=build, quiet=True, update=True)
    if code not in (ExitCode.OK, ExitCode.INTERRUPTED if stop_after else ExitCode.OK):
        raise ViolationError(f"exit {code}")
    return set(build.ran)


def _data(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "data").iterdir())}
