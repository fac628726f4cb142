"""Runs all tests and benchmarks that need a GPU, and stores each result immediately.

python benchmarks/gpu.py --out FOLDER                    # all stages
python benchmarks/gpu.py --stages bench --models Qwen3-0.6B --workloads W1 W3
python benchmarks/gpu.py --deadline 580                  # start no stage after 580 s
python benchmarks/gpu.py --dry-run                       # tiny shapes on a CPU

Each task (a stage, or a stage for one model) runs in its own process with a time limit, so that a
task that hangs or breaks the device does not affect other tasks. FOLDER has cells.jsonl,
results.json and logs/, and keeps the results of earlier calls. Every 15 s, results.json and the
packed logs are copied to the folder in the environment variable OUT, if set.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_outbox import Outbox
from gpu_processes import ROOT, Task, has_cuda, run_task
from gpu_results import Results

STAGES = {
    "smoke": 100,
    "bench": 400,
    "attention": 220,
    "kernels": 300,
    "parity": 60,
    "linears": 240,
    "peers": 270,
}
"""Time limits of stages in seconds, in the order in which the stages run."""
MODELS = ("Qwen3-0.6B", "Llama-3.1-8B")
_OPTIONAL_MODELS = ("Qwen3-8B",)
WORKLOADS = ("W1", "W2", "W3")
_LIMITS = {"attention": 110, "linears": 120, "peers": 65}
"""Time limits of tasks in seconds, if shorter than the stage's limit."""
_BENCH_LIMITS = {"Qwen3-0.6B": 180, "Llama-3.1-8B": 220, "Qwen3-8B": 220}
_PEERS = ("generate", "generate_batch", "flashinfer")
_COPY_LIMIT_S = 20
_DRY_LIMIT_S = 600  # the interpreter may run on a slow CPU


def tasks(
    stage: str, models: list[str], workloads: list[str], *, layer_major: bool = False
) -> list[Task]:
    limit = STAGES[stage]
    if stage in ("smoke", "kernels", "parity"):
        return [Task(stage, stage, (), limit)]
    todo = []
    for model in models:
        arguments = ("--model", model)
        if stage == "bench":
            arguments += ("--workloads", *workloads, *["--layer-major"][: int(layer_major)])
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
    """Return the peers that can run: transformers' peers, and FlashInfer if it is installed."""
    return [peer for peer in _PEERS if peer != "flashinfer" or find_spec("flashinfer")]


def run_stage(
    stage: str, todo: list[Task], results: Results, *, deadline: float, dry_run: bool
) -> None:
    """Run tasks one after the other until the stage's time limit. All tasks must end before
    ``deadline``, a value of `time.monotonic`."""
    print(f"\n== {stage}", flush=True)
    ends = min(deadline, time.monotonic() + STAGES[stage])
    for task in todo:
        limit_s = _DRY_LIMIT_S if dry_run else min(task.limit_s, ends - time.monotonic())
        if limit_s < 1:
            outcome: dict[str, Any] = {
                "ok": False,
                "error": "not run: the time is up",
            }
        else:
            outcome = run_task(task, results.folder, limit_s, dry_run=dry_run)
        results.add("tasks", task.name, {"stage": stage, **outcome})


def failures(results: Results, stages: list[str], names: set[str]) -> list[str]:
    """Return the failed cells of these stages, and the failed tasks among `names`."""
    stored = results.read()
    cells = [(stage, cell) for stage in stages for cell in stored.get(stage, {})]
    cells += [("tasks", name) for name in stored.get("tasks", {}) if name in names]
    return [f"{stage}: {cell}" for stage, cell in cells if not stored[stage][cell].get("ok", True)]


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
    parser.add_argument("--layer-major", action="store_true", help="bench with a layer-major pool")
    parser.add_argument(
        "--deadline", type=float, default=float("inf"), help="seconds that all stages may take"
    )
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    deadline = time.monotonic() + args.deadline
    if not args.dry_run and not has_cuda():
        sys.exit("no CUDA device; --dry-run runs tiny shapes on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"terminated by signal {signal.SIGTERM}"))
    with ExitStack() as stack:
        folder = args.out or ROOT / "out" / "gpu"
        if args.dry_run and not args.out:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        results = Results(folder)
        copies = Path(os.environ.get("OUT") or folder)
        if copies.resolve() != folder.resolve():
            stack.callback(Outbox(folder, copies).close, _COPY_LIMIT_S)
        models = ["tiny"] if args.dry_run else args.models
        names = set()
        for stage in args.stages:
            todo = tasks(stage, models, args.workloads, layer_major=args.layer_major)
            names |= {task.name for task in todo}
            run_stage(stage, todo, results, deadline=deadline, dry_run=args.dry_run)
        print(f"\nresults are in {results.folder}")
        if failed := failures(results, args.stages, names):
            sys.exit("failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
