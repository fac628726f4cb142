"""Shows in ten minutes whether the CUDA path works on this machine, and how fast it is.

python3 benchmarks/first_light.py                        # all stages, on a CUDA device
python3 benchmarks/first_light.py --stages smoke         # one stage
python3 benchmarks/first_light.py --device cpu           # a rehearsal: tiny models, interpreted

Each stage runs in its own process with a time limit. If a stage fails, its error and a command that
repeats the stage are recorded, and the next stage runs. Every 15 s, the results so far are copied
to the folder of results (--out, or the environment variable OUT, or out/first-light). The folder
then has results.json; first-light.md, which explains the results; logs.tgz; and triton-cache.tgz,
from which the next run gets compiled kernels. The program needs no network, and only the packages
that benchmarks/README.md lists.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from first_light_report import StageReport, page
from gpu_outbox import CACHE, Outbox, unpack_cache
from gpu_processes import ROOT, TRITON_CACHE, Task, run_task
from gpu_results import Results

DEADLINE_S = 580.0
PACK_S = 15.0
"""Seconds that are reserved at the end for the last copy of the results."""


@dataclass(frozen=True)
class Stage:
    name: str
    shows: str
    limit_s: float
    kind: str
    arguments: tuple[str, ...] = ()

    @property
    def task(self) -> Task:
        return Task(self.kind, self.name, self.arguments, self.limit_s)


def stages(*, dry_run: bool) -> list[Stage]:
    """Return the stages in order, the most important first."""
    small, large = ("tiny", "tiny-llama") if dry_run else ("Qwen3-0.6B", "Llama-3.1-8B")
    return [
        Stage("environment", "what the machine has", 20, "environment"),
        Stage("smoke", "whether the results of kernels and CUDA graphs are right", 75, "smoke"),
        Stage(
            "bench-0.6B",
            f"the speed of {small} on W1",
            150,
            "bench",
            ("--model", small, "--workloads", "W1"),
        ),
        Stage(
            "layer-major-0.6B",
            "the same with a layer-major pool",
            60,
            "bench",
            ("--model", small, "--workloads", "W1", "--layer-major"),
        ),
        Stage(
            "bench-8B",
            f"the speed of {large} on W1 and W3",
            140,
            "bench",
            ("--model", large, "--workloads", "W1", "W3"),
        ),
        Stage(
            "attention-8B",
            "the bandwidth of decode attention in a whole pool",
            40,
            "attention",
            ("--model", large, "--brief"),
        ),
        Stage("kernels", "the GPU tests, the most valuable first", 80, "kernels", ("--brief",)),
    ]


def limit_of(todo: list[Stage], place: int, left_s: float) -> float:
    """Return the number of seconds that stage ``todo[place]`` may take; 0 or less if no time is
    left.

    A stage may use its own limit, and the time that earlier stages did not use. Time for the last
    copy of the results is always reserved. ``left_s`` is the number of seconds until the deadline.
    """
    left_s -= PACK_S
    later_s = sum(stage.limit_s for stage in todo[place + 1 :])
    return min(left_s, max(todo[place].limit_s, left_s - later_s))


@dataclass
class FirstLight:
    """Runs stages until a deadline, and reports their outcomes."""

    work: Path
    todo: list[Stage]
    deadline_s: float
    dry_run: bool
    began: float = field(default_factory=time.monotonic)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.results = Results(self.work)
        self.reports = [
            StageReport(stage.name, stage.shows, stage.limit_s, command_of(stage, self.dry_run))
            for stage in self.todo
        ]

    def run(self) -> None:
        for place, stage in enumerate(self.todo):
            report = self.reports[place]
            left_s = self.began + self.deadline_s - time.monotonic()
            limit_s = limit_of(self.todo, place, left_s)
            print(f"\n== {stage.name}: {stage.shows}", flush=True)
            if limit_s < 1:
                report.end({"ok": False, "seconds": 0.0, "error": "not run: the time was up"}, {})
                continue
            report.begin(limit_s)
            before = self.results.read()
            outcome = run_task(stage.task, self.work, limit_s, dry_run=self.dry_run)
            self.results.add("tasks", stage.name, {**outcome, "command": report.command})
            report.end(outcome, _new_cells(before, self.results.read()))

    def page(self, left_out: int) -> dict[str, str]:
        """Return the report's file name and text. ``left_out`` is the number of compiled kernels
        that are not kept for the next run."""
        notes = list(self.notes)
        if left_out:
            notes.append(f"{CACHE} is full: {left_out} compiled kernels are not in it.")
        text = page(
            self.reports,
            self.results.read(),
            seconds=time.monotonic() - self.began,
            deadline_s=self.deadline_s,
            notes=notes,
            dry_run=self.dry_run,
        )
        return {"first-light.md": text}


def _new_cells(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the cells that are only in ``after``, keyed by stage and name."""
    return {
        f"{stage}: {cell}": values
        for stage, cells in after.items()
        for cell, values in cells.items()
        if stage != "tasks" and before.get(stage, {}).get(cell) != values
    }


def command_of(stage: Stage, dry_run: bool) -> str:
    device = " --device cpu" if dry_run else ""
    return f"python3 benchmarks/first_light.py{device} --stages {stage.name}"


def restore_cache(candidates: list[Path]) -> str:
    """Unpack the first Triton cache that exists, and return a remark about it."""
    for packed in candidates:
        if packed.exists():
            try:
                return f"{unpack_cache(packed, TRITON_CACHE)} compiled kernels came from {packed}."
            except ValueError as error:
                return f"All kernels were compiled anew: {error}."
    return f"All kernels were compiled anew, because there was no {CACHE} of an earlier run."


def main() -> None:
    began = time.monotonic()
    names = [stage.name for stage in stages(dry_run=False)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ROOT / "out" / "first-light"
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds (default 580)")
    parser.add_argument("--stages", nargs="+", default=names, choices=names)
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or default), help="folder of results"
    )
    parser.add_argument(
        "--triton-cache", type=Path, help=f"the {CACHE} of an earlier run (default: the one in "
        "the folder of results, or in out/first-light)",
    )  # fmt: skip
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"terminated by signal {signal.SIGTERM}"))
    dry_run = args.device == "cpu"
    todo = [stage for stage in stages(dry_run=dry_run) if stage.name in args.stages]
    with tempfile.TemporaryDirectory(prefix="first-light-") as work:
        run = FirstLight(Path(work), todo, args.deadline, dry_run, began)
        if not dry_run:
            given = (
                [args.triton_cache] if args.triton_cache else [args.out / CACHE, default / CACHE]
            )
            run.notes.append(restore_cache(given))
        outbox = Outbox(run.work, args.out, cache=None if dry_run else TRITON_CACHE, page=run.page)
        try:
            run.run()
        finally:
            if not outbox.close(PACK_S):
                print(outbox.error, file=sys.stderr)
    print(f"\nread {args.out / 'first-light.md'}")
    failed = [report for report in run.reports if not report.ok]
    if failed or outbox.error:
        sys.exit("failed: " + ", ".join([report.name for report in failed] or [outbox.error]))


if __name__ == "__main__":
    main()
