"""Runs all tests and benchmarks that need a GPU, and stores each result immediately.

python benchmarks/gpu.py --out FOLDER                    # all stages
python benchmarks/gpu.py --stages bench --models Qwen3-0.6B --workloads W1 W3
python benchmarks/gpu.py --dry-run                       # tiny shapes on a CPU

Each task (a stage, or a stage for one model) runs in its own process with a time limit, so that a
task that hangs or breaks the device does not affect other tasks. FOLDER has cells.jsonl,
results.json and logs/, and keeps the results of earlier calls.
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
"""Time limits of stages in seconds: any two stages take at most nine minutes."""
MODELS = ("Qwen3-0.6B", "Llama-3.1-8B")
_OPTIONAL_MODELS = ("Qwen3-8B",)
WORKLOADS = ("W1", "W2", "W3")
_LIMITS = {"attention": 110, "linears": 60, "peers": 65}
"""Time limits of tasks in seconds, if shorter than the stage's limit."""
_BENCH_LIMITS = {"Qwen3-0.6B": 110}
_PEERS = ("generate", "generate_batch", "flashinfer")
_DRY_LIMIT_S = 600  # the interpreter may run on a slow CPU
_KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Task:
    """A process of ``gpu_task.py``; its log has the same name."""

    stage: str
    name: str
    arguments: tuple[str, ...]
    limit_s: float


def tasks(stage: str, models: list[str], workloads: list[str]) -> list[Task]:
    """Return the tasks of a stage in order."""
    limit = STAGES[stage]
    if stage in ("kernels", "parity"):
        return [Task(stage, stage, (), limit)]
    todo = []
    for model in models:
        arguments = ("--model", model)
        if stage == "bench":
            arguments += ("--workloads", *workloads)
            todo.append(Task(stage, f"bench-{model}", arguments, _BENCH_LIMITS.get(model, limit)))
        elif stage in ("attention", "linears"):
            todo.append(Task(stage, f"{stage}-{model}", arguments, _LIMITS[stage]))
        else:
            todo += [
                Task(stage, f"{peer}-{model}", (*arguments, "--peer", peer), _LIMITS[stage])
                for peer in installed_peers()
            ]
    return todo


def installed_peers() -> list[str]:
    """Return the peers that can run: those of transformers, and FlashInfer if it is installed."""
    return [peer for peer in _PEERS if peer != "flashinfer" or find_spec("flashinfer")]


def run_stage(stage: str, todo: list[Task], results: Results, *, dry_run: bool) -> None:
    """Run tasks one after the other until the stage's time limit."""
    print(f"\n== {stage}", flush=True)
    ends = time.monotonic() + STAGES[stage]
    for task in todo:
        limit_s = _DRY_LIMIT_S if dry_run else min(task.limit_s, ends - time.monotonic())
        if limit_s < 1:
            outcome: dict[str, Any] = {
                "ok": False,
                "error": "not run: the stage's time is up",
            }
        else:
            outcome = run_task(task, results.folder, limit_s, dry_run=dry_run)
        results.add("tasks", task.name, {"stage": stage, **outcome})


def run_task(task: Task, folder: Path, limit_s: float, *, dry_run: bool) -> dict[str, Any]:
    """Run a task to its end or its time limit; print its output and store it in a log."""
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
        last = (log.read_text().strip().splitlines() or ["no output"])[-1]
        return outcome | {"error": f"exit code {process.returncode}: {last[:500]}"}
    return outcome


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a task and all processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _environment(dry_run: bool) -> dict[str, str]:
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",  # keeps the output of a killed process
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    if dry_run:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.setdefault("OMP_NUM_THREADS", "1")  # fastest for tiny shapes
    return environment


def failures(results: Results, stages: list[str], names: set[str]) -> list[str]:
    """Return the failed cells of these stages, and the failed tasks among `names`."""
    stored = results.read()
    cells = [(stage, cell) for stage in stages for cell in stored.get(stage, {})]
    cells += [("tasks", name) for name in stored.get("tasks", {}) if name in names]
    return [f"{stage}: {cell}" for stage, cell in cells if not stored[stage][cell].get("ok", True)]


def _has_cuda() -> bool:
    """Check in another process, so that this process allocates no device memory."""
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=[*MODELS, *_OPTIONAL_MODELS]
    )
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--out", type=Path, help="folder of results (default: out/gpu)")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if not args.dry_run and not _has_cuda():
        sys.exit("no CUDA device; --dry-run runs tiny shapes on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"terminated by signal {signal.SIGTERM}"))
    with tempfile.TemporaryDirectory() as temporary:
        default = Path(temporary) if args.dry_run else ROOT / "out" / "gpu"
        results = Results(args.out or default)
        models = ["tiny"] if args.dry_run else args.models
        names = set()
        for stage in args.stages:
            todo = tasks(stage, models, args.workloads)
            names |= {task.name for task in todo}
            run_stage(stage, todo, results, dry_run=args.dry_run)
        print(f"\nresults are in {results.folder}")
        if failed := failures(results, args.stages, names):
            sys.exit("failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
