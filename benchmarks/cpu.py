"""Compares engines on a CPU, in separate processes, by the medians of alternating rounds.

python benchmarks/cpu.py                       # the table of benchmarks/README.md; takes an hour
python benchmarks/cpu.py --workloads W1 --engines batchinfer generate --rounds 2
python benchmarks/cpu.py --shape hybrid --engines batchinfer vllm --dtypes bfloat16
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engines import ENGINES
from models import MAKERS
from peers import python_of
from result_files import write_results

HERE = Path(__file__).resolve().parent
DTYPES = ("float32", "bfloat16")
WORKLOADS = ("W1", "W2", "W3")

Run = dict[str, Any]


def run_once(engine: str, workload: str, dtype: str, args: argparse.Namespace) -> Run:
    """Run an engine on a workload in a new process. Return the result, or the error."""
    command = [*args.before, python_of(engine, args.folder), str(HERE / "engines.py"), engine]
    command += [str(args.folder / args.shape), "--workload", workload, "--dtype", dtype]
    command += ["--scale", str(args.scale), "--batch", str(args.batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        run = {"engine": engine, "workload": workload, "dtype": dtype}
        return run | {"error": done.stderr.strip().splitlines()[-1:]}
    result: Run = json.loads(lines[-1])
    return result


def measure_bounds(args: argparse.Namespace) -> list[Run]:
    bounds: list[Run] = []
    if args.shape == "hybrid":  # `bound.py` counts only layers with attention
        return bounds
    for dtype in args.dtypes:
        command = [*args.before, sys.executable, str(HERE / "bound.py")]
        command += [str(args.folder / args.shape), "--dtype", dtype, "--scale", str(args.scale)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for workload, tokens in json.loads(done.stdout).items():
            run = {"engine": "bound", "workload": workload, "dtype": dtype}
            bounds.append(run | {"output_tokens_per_s": tokens})
    return bounds


def measure(args: argparse.Namespace) -> list[Run]:
    runs = []
    for _ in range(args.rounds):
        runs += measure_bounds(args)
        for dtype in args.dtypes:
            for workload in args.workloads:
                for engine in args.engines:
                    runs.append(run_once(engine, workload, dtype, args))
                    result = runs[-1].get("output_tokens_per_s", runs[-1].get("error"))
                    print(dtype, workload, engine, result, flush=True)
                    keep(runs, args)
    return runs


def table(runs: list[Run], args: argparse.Namespace) -> str:
    """Return a table of median output tokens/s. The ratios are the speed of the first engine
    divided by the speed of each other engine."""
    lines = []
    for dtype in args.dtypes:
        engines = [*args.engines, "bound"]
        lines += [f"| {dtype} | {' | '.join(engines)} |", "|---" * (len(engines) + 1) + "|"]
        for workload in args.workloads:
            rates = [median(runs, engine, workload, dtype) for engine in engines]
            cells = [f"{rates[0]:.0f}"] + [
                f"{rate:.0f} ({rates[0] / rate:.2f}x)" if rate else "-" for rate in rates[1:]
            ]
            lines.append(f"| {workload} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def median(runs: list[Run], engine: str, workload: str, dtype: str) -> float:
    """Return an engine's median output tokens/s on a workload; 0 if it has no result."""
    rates = [
        run["output_tokens_per_s"]
        for run in runs
        if (run["engine"], run["workload"], run["dtype"]) == (engine, workload, dtype)
        and "output_tokens_per_s" in run
    ]
    return statistics.median(rates) if rates else 0.0


def keep(runs: list[Run], args: argparse.Namespace) -> Path:
    where = {
        "date": date.today().isoformat(),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("batchinfer", "torch", "transformers")},
    }
    settings = {"scale": args.scale, "rounds": args.rounds, "batch": args.batch}
    shape = "" if args.shape == "small" else f"{args.shape}-"
    path = HERE / "results" / f"cpu-{where['date']}-{shape}scale-{args.scale:g}.json"
    path.parent.mkdir(exist_ok=True)
    write_results(path, {"machine": where, "settings": settings, "runs": runs})
    return path


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--shape", default="small", choices=MAKERS, help="the model")
    parser.add_argument("--scale", type=float, default=0.25, help="share of the rows")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch of generate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=HERE / "work", help="folder of model and peers"
    )
    parser.add_argument(
        "--before", default="", help="command prefix for each process, such as taskset"
    )
    args = parser.parse_args()
    args.before = args.before.split()
    MAKERS[args.shape](args.folder / args.shape)
    runs = measure(args)
    print(table(runs, args))
    print(f"written to {keep(runs, args)}")


if __name__ == "__main__":
    main()
