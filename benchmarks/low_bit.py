"""Compares low-bit weights on a CPU with bfloat16, OpenVINO's int8 and llama.cpp's Q8_0.

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
"""The function that creates each model, and the share of a workload's rows to run with it."""
SHARES = {"llama-q8_0": 0.5}
"""Factors that reduce the share of rows for engines that are several times slower than others."""

Run = dict[str, Any]


def run_all(name: str, model: str, threads: int, args: argparse.Namespace) -> list[Run]:
    engine, *options = ENGINES[name]
    workloads = [*args.workloads]
    if engine == "batchinfer" and model == "large":
        workloads += FEW_ROWS
    command = ["taskset", "-c", f"0-{threads - 1}", python_of(engine, args.peers)]
    command += [str(HERE / "engines.py"), engine, str(args.folder / model), *options]
    scale = MODELS[model][1] * SHARES.get(name, 1.0)
    command += ["--workload", *workloads, "--scale", str(scale)]
    command += ["--dtype", "bfloat16", "--threads", str(threads)]
    settings = {"name": name, "model": model, "threads": threads}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=args.timeout
        )
    except subprocess.TimeoutExpired:
        return [settings | {"error": f"more than {args.timeout} s"}]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return [settings | {"error": done.stderr.strip().splitlines()[-1:]}]
    took = time.perf_counter() - began
    return [settings | {"process_s": took, "load": os.getloadavg()[0]} | line for line in lines]


def measure(args: argparse.Namespace) -> list[Run]:
    """Run all engines in turn on each model and number of threads, until the time is up."""
    ends = time.monotonic() + 60 * args.minutes
    runs: list[Run] = []
    for _ in range(args.rounds):
        for model, threads, name in product(args.models, args.threads, args.engines):
            if time.monotonic() > ends:
                return runs
            new = run_all(name, model, threads, args)
            runs += new
            for run in new:
                result = run.get("output_tokens_per_s", run.get("error"))
                print(
                    model, f"{threads} threads", name, run.get("workload", ""), result, flush=True
                )
            keep(runs, args)
    return runs


def perplexities() -> list[Run]:
    """Measure perplexity and correct answers of the quickstart's model with low-bit weights."""
    command = [sys.executable, str(HERE / "perplexity.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def keep(runs: list[Run], args: argparse.Namespace, accuracy: list[Run] | None = None) -> None:
    where = {"date": date.today().isoformat(), "cpu": _cpu_name(), "threads": args.threads}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    results = {"machine": where, "runs": runs, "quickstart": accuracy or []}
    write_results(args.json, results)


def table(runs: list[Run], args: argparse.Namespace) -> str:
    """Return a table of median output tokens/s, with ratios to bfloat16."""
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
    lines = ["| weights | text | answers | correct |", "|---|---|---|---|"]
    for run in accuracy:
        text, answers = run["text_perplexity"], run["answer_perplexity"]
        name = run["quantization"] or run["dtype"]
        lines.append(f"| {name} | {text:.4f} | {answers:.5f} | {run['right']:.1%} |")
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
    parser.add_argument("--minutes", type=float, default=10, help="start no run after this time")
    parser.add_argument("--timeout", type=float, default=240, help="seconds per engine and model")
    parser.add_argument("--folder", type=Path, default=HERE / "work", help="models")
    parser.add_argument(
        "--peers", type=Path, default=HERE / "work", help="environments of other engines"
    )
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
