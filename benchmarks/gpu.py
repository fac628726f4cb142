"""Tests and measures everything that needs a GPU; every result is kept as soon as it is there.

python benchmarks/gpu.py --out FOLDER                    # all stages
python benchmarks/gpu.py --stages bench --models Qwen3-0.6B --workloads W1 W3
python benchmarks/gpu.py --dry-run                       # the same code on a CPU, tiny

Each task (a stage, or a stage on one model) is a process of its own with a time limit: one that
hangs or breaks the device takes nothing along. FOLDER has cells.jsonl, results.json and logs/, and
keeps the results of earlier calls.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

from gpu_results import Results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STAGES = {
    "kernels": 250,
    "parity": 60,
    "attention": 220,
    "linears": 120,
    "bench": 270,
    "peers": 270,
}
"""Seconds that a stage may take: any two of them fit in nine minutes."""
MODELS = ("Qwen3-0.6B", "Llama-3.1-8B")
_ASKED_FOR = ("Qwen3-8B",)
WORKLOADS = ("W1", "W2", "W3")
_LIMITS = {"attention": 110, "linears": 60, "peers": 65}
"""Seconds that one task may take, where that is less than its stage."""
_BENCH_LIMITS = {"Qwen3-0.6B": 110}
_PEERS = ("generate", "generate_batch", "flashinfer")
_DRY_LIMIT_S = 600  # interpreted, on whatever CPU there is
_KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Task:
    """A process of ``gpu_task.py``: its stage, its name among the logs, and its arguments."""

    stage: str
    name: str
    arguments: tuple[str, ...]
    limit_s: float


def tasks(stage: str, models: list[str], workloads: list[str]) -> list[Task]:
    """What a stage consists of, in order."""
    limit = STAGES[stage]
    if stage in ("kernels", "parity"):
        return [Task(stage, stage, (), limit)]
    found = []
    for model in models:
        named = ("--model", model)
        if stage == "bench":
            told = (*named, "--workloads", *workloads)
            limit_s = _BENCH_LIMITS.get(model, limit)
            found.append(Task(stage, f"bench-{model}", told, limit_s))
        elif stage in ("attention", "linears"):
            found.append(Task(stage, f"{stage}-{model}", named, _LIMITS[stage]))
        else:
            for peer in peers_here():
                told = (*named, "--peer", peer)
                found.append(Task(stage, f"{peer}-{model}", told, _LIMITS[stage]))
    return found


def peers_here() -> list[str]:
    """Those that are installed: transformers, and FlashInfer if it is."""
    return [peer for peer in _PEERS if peer != "flashinfer" or find_spec("flashinfer")]


def run_stage(stage: str, todo: list[Task], results: Results, *, dry_run: bool) -> None:
    """Run tasks one after the other, until the stage's time is over."""
    print(f"\n== {stage}", flush=True)
    ends = time.monotonic() + STAGES[stage]
    for task in todo:
        limit_s = _DRY_LIMIT_S if dry_run else min(task.limit_s, ends - time.monotonic())
        if limit_s < 1:
            outcome: dict[str, Any] = {"ok": False, "error": "no time was left for it"}
        else:
            outcome = run_task(task, results.folder, limit_s, dry_run=dry_run)
        results.add("tasks", task.name, {"stage": stage, **outcome})


def run_task(task: Task, folder: Path, limit_s: float, *, dry_run: bool) -> dict[str, Any]:
    """Run a task to its end or its time limit; what it prints is shown, and kept in a log."""
    log = folder / "logs" / f"{task.name}.log"
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE / "gpu_task.py"), task.stage, *task.arguments]
    command += ["--out", str(folder), "--seconds", f"{limit_s:.0f}"]
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--dry-run"] if dry_run else command,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=_environment(dry_run), start_new_session=True,
        )  # fmt: skip
        timer = Timer(limit_s, _kill, (process,))
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                print(line, end="", flush=True)
            process.wait()
        finally:
            timer.cancel()
            _kill(process)
            process.stdout.close()
    seconds = time.monotonic() - began
    outcome = {"ok": process.returncode == 0, "seconds": seconds, "log": f"logs/{log.name}"}
    if process.returncode == _KILLED and seconds >= limit_s:
        return outcome | {"error": f"killed after {limit_s:.0f} s"}
    if process.returncode != 0:
        last = (log.read_text().strip().splitlines() or ["nothing was printed"])[-1]
        return outcome | {"error": f"ended with {process.returncode}: {last[:500]}"}
    return outcome


def _kill(process: subprocess.Popen[str]) -> None:
    """End a task with all processes that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _environment(dry_run: bool) -> dict[str, str]:
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",  # a log has what was printed before its process was killed
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    if dry_run:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.setdefault("OMP_NUM_THREADS", "1")  # tiny products only lose by more
    return environment


def wrong(results: Results, stages: list[str], names: set[str]) -> list[str]:
    """Cells of these stages, and tasks, that are not right."""
    found = results.read()
    cells = [(stage, cell) for stage in stages for cell in found.get(stage, {})]
    cells += [("tasks", name) for name in found.get("tasks", {}) if name in names]
    return [f"{stage}: {cell}" for stage, cell in cells if not found[stage][cell].get("ok", True)]


def _has_cuda() -> bool:
    """Asked in another process: this one is to hold none of the device's memory."""
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=[*MODELS, *_ASKED_FOR])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--out", type=Path, help="folder of results (default: out/gpu)")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if not args.dry_run and not _has_cuda():
        sys.exit("no CUDA device: give --dry-run to run the same code on a CPU, tiny")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"ended by signal {signal.SIGTERM}"))
    with tempfile.TemporaryDirectory() as unkept:
        unnamed = Path(unkept) if args.dry_run else ROOT / "out" / "gpu"
        results = Results(args.out or unnamed)
        models = ["tiny"] if args.dry_run else args.models
        names = set()
        for stage in args.stages:
            todo = tasks(stage, models, args.workloads)
            names |= {task.name for task in todo}
            run_stage(stage, todo, results, dry_run=args.dry_run)
        print(f"\nresults are in {results.folder}")
        if not_right := wrong(results, args.stages, names):
            sys.exit("not right:\n" + "\n".join(not_right))


if __name__ == "__main__":
    main()
