"""Weights of few bits on a CPU beside bfloat16, OpenVINO's int8 and llama.cpp's Q8_0, in turn.

python benchmarks/low_bit.py --threads 4 2 --rounds 1 --minutes 12 --json out/low_bit.json
python benchmarks/low_bit.py --engines batchinfer-bf16 batchinfer-int8 --models small
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from cpu import _cpu_name
from models import make_large, make_small
from peers import python_of
from result_files import write_results

HERE = Path(__file__).resolve().parent
ENGINES = {
    "batchinfer-bf16": ("batchinfer",),
    "batchinfer-int8": ("batchinfer", "--quantization", "int8"),
    "batchinfer-int4": ("batchinfer", "--quantization", "int4"),
    "openvino-int8": ("openvino", "--quantization", "int8"),
    "llama-q8_0": ("llama", "--quantization", "q8_0"),
}
FEW_ROWS = ("D1", "D4", "D8")
MODELS = {"small": (make_small, 0.25), "large": (make_large, 0.125)}
"""What makes each, and the share of the workloads' rows that it runs."""
SHARES = {"llama-q8_0": 0.5}
"""Of those rows, for an engine that takes several times as long as the others."""

Run = dict[str, Any]


def run_all(name: str, model: str, threads: int, args: argparse.Namespace) -> list[Run]:
    """One engine over all workloads on one model, in a fresh process."""
    engine, *options = ENGINES[name]
    workloads = [*args.workloads]
    if engine == "batchinfer" and model == "large":
        workloads += FEW_ROWS
    command = ["taskset", "-c", f"0-{threads - 1}", python_of(engine, args.peers)]
    command += [str(HERE / "engines.py"), engine, str(args.folder / model), *options]
    scale = MODELS[model][1] * SHARES.get(name, 1.0)
    command += ["--workload", *workloads, "--scale", str(scale)]
    command += ["--dtype", "bfloat16", "--threads", str(threads)]
    asked = {"name": name, "model": model, "threads": threads}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=args.timeout
        )
    except subprocess.TimeoutExpired:
        return [asked | {"error": f"more than {args.timeout} s"}]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return [asked | {"error": done.stderr.strip().splitlines()[-1:]}]
    took = time.perf_counter() - began
    return [asked | {"process_s": took, "load": os.getloadavg()[0]} | line for line in lines]


def measure(args: argparse.Namespace) -> list[Run]:
    """A B C, A B C, ... on each model and number of threads, for as long as there is time."""
    ends = time.monotonic() + 60 * args.minutes
    runs: list[Run] = []
    for _ in range(args.rounds):
        for model, threads, name in product(args.models, args.threads, args.engines):
            if time.monotonic() > ends:
                return runs
            new = run_all(name, model, threads, args)
            runs += new
            for run in new:
                said = run.get("output_tokens_per_s", run.get("error"))
                print(model, f"{threads} threads", name, run.get("workload", ""), said, flush=True)
            keep(runs, args)
    return runs


def perplexities() -> list[Run]:
    """What the same weights cost in perplexity and right answers, on the quickstart's model."""
    command = [sys.executable, str(HERE / "perplexity.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def keep(runs: list[Run], args: argparse.Namespace, accuracy: list[Run] | None = None) -> None:
    """Write what has been measured so far, with date and machine."""
    where = {"date": date.today().isoformat(), "cpu": _cpu_name(), "threads": args.threads}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    results = {"machine": where, "runs": runs, "quickstart": accuracy or []}
    write_results(args.json, results)


def table(runs: list[Run], args: argparse.Namespace) -> str:
    """Medians of output tokens/s, and how many times that of bfloat16 each is."""
    lines = [f"| | {' | '.join(args.engines)} |", "|---" * (len(args.engines) + 1) + "|"]
    for model, threads in product(args.models, args.threads):
        for workload in (*args.workloads, *(FEW_ROWS if model == "large" else ())):
            rates = [_median(runs, name, model, threads, workload) for name in args.engines]
            cells = [
                f"{rate:.0f} ({rate / rates[0]:.2f}x)" if rate and rates[0] else "-"
                for rate in rates
            ]
            lines.append(f"| {model} {workload}, {threads} threads | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_table(accuracy: list[Run]) -> str:
    """Perplexities of the quickstart's texts and answers, and its right answers."""
    lines = ["| weights | text | answers | right |", "|---|---|---|---|"]
    for one in accuracy:
        text, answers = one["text_perplexity"], one["answer_perplexity"]
        name = one["quantization"] or one["dtype"]
        lines.append(f"| {name} | {text:.4f} | {answers:.5f} | {one['right']:.1%} |")
    return "\n".join(lines)


def _median(runs: list[Run], name: str, model: str, threads: int, workload: str) -> float:
    wanted = name, model, threads, workload
    rates = [
        run["output_tokens_per_s"]
        for run in runs
        if (run["name"], run["model"], run["threads"], run.get("workload")) == wanted
    ]
    return statistics.median(rates) if rates else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--workloads", nargs="+", default=["W1", "W3"])
    parser.add_argument("--threads", type=int, nargs="+", default=[os.cpu_count()])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10, help="no run begins after them")
    parser.add_argument(
        "--timeout", type=float, default=240, help="seconds, of an engine on a model"
    )
    parser.add_argument("--folder", type=Path, default=HERE / "work", help="models")
    parser.add_argument("--peers", type=Path, default=HERE / "work", help="their environments")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "low-bit.json")
    args = parser.parse_args()
    for model in args.models:
        MODELS[model][0](args.folder / model)
    runs = measure(args)
    print(table(runs, args))
    accuracy = perplexities()
    keep(runs, args, accuracy)
    print(accuracy_table(accuracy))
    print(f"written to {args.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
