"""A small job on several workers of one machine against the same job in one process.

    python benchmarks/fleet_start.py [--rounds 5] [--workers 2] [--job jobs/quickstart.yaml]

The two run in turn, each as a user runs it, from the command to its exit code: of a job of seconds,
most is the start and the end. After a round that only fills the page cache, prints for each run its
wall time and the processor time of all of its processes, and in the end the ratio of the medians.
Checks that both give the same bytes. Nothing else may use the machine meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.05


@dataclass(frozen=True)
class Ran:
    """What a run took, and what it gave."""

    wall_s: float
    cpu_s: float
    """Of its processes as they were seen last, some hundredths of a second before each ended."""
    prompt_tokens: int
    """That were computed."""
    digest: str
    """Of the bytes of ``data/``."""


def run(job: Path, workers: int) -> Ran:
    """Run a job to its end."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "batchinfer", "run", str(job), "--output", str(out)]
        began = time.monotonic()
        process = psutil.Popen(
            [*command, "--workers", str(workers), "--quiet"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        cpu_s: dict[tuple[int, float], float] = {}
        while True:
            _note_cpu(process, cpu_s)
            try:
                code = process.wait(_POLL_S)
                break
            except psutil.TimeoutExpired:
                continue
        wall_s = time.monotonic() - began
        if code:
            sys.exit(f"{' '.join(command)} ended with {code}")
        summary = json.loads((out / "summary.json").read_text())
        return Ran(
            wall_s, sum(cpu_s.values()), summary["tokens"]["prompt_computed"], _digest(out / "data")
        )


def _note_cpu(process: psutil.Process, cpu_s: dict[tuple[int, float], float]) -> None:
    """Note the processor time of a process and of all below it that are there."""
    try:
        found = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in found:
        try:
            times = one.cpu_times()
            cpu_s[one.pid, one.create_time()] = times.user + times.system
        except psutil.NoSuchProcess:
            continue


def _digest(data: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(data.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--job", type=Path, default=ROOT / "jobs" / "quickstart.yaml")
    options = parser.parse_args()
    ran: dict[int, list[Ran]] = {1: [], options.workers: []}
    for number in range(options.rounds + 1):
        for workers, runs in ran.items():
            done = run(options.job, workers)
            what = f"round {number}" if number else "not counted"
            print(
                f"{what}: {workers} workers {done.wall_s:.2f} s, {done.cpu_s:.1f} s of processors, "
                f"{done.prompt_tokens:,} prompt tokens computed",
                flush=True,
            )
            runs += [done] if number else []
    assert len({done.digest for runs in ran.values() for done in runs}) == 1, "other bytes"
    alone, fleet = ran[1], ran[options.workers]
    walls = [statistics.median(done.wall_s for done in runs) for runs in (alone, fleet)]
    tokens = fleet[0].prompt_tokens / alone[0].prompt_tokens
    print(
        f"wall time {walls[0]:.2f} s alone, {walls[1]:.2f} s on {options.workers} workers: "
        f"{walls[1] / walls[0]:.3f}; prompt tokens {tokens:.4f}; equal bytes"
    )


if __name__ == "__main__":
    main()
