"""Compare engines on a CPU: each in a process of its own, in turn, medians of several rounds.

python benchmarks/cpu.py --rounds 3 --scale 0.25      # prints a table, writes results/
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from models import make_small

HERE = Path(__file__).resolve().parent


def run_once(engine: str, model: Path, workload: str, args: argparse.Namespace) -> dict[str, Any]:
    """One engine, one workload, in a fresh process."""
    command = [sys.executable, str(HERE / "engines.py"), engine, str(model)]
    command += ["--workload", workload, "--scale", str(args.scale), "--dtype", args.dtype]
    command += ["--batch", str(args.batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def cpu_name() -> str:
    """The processor, as Linux calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["batchinfer", "generate"])
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, help="keep the model here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = make_small((args.models or Path(scratch)) / "small")
        runs = []
        for _ in range(args.rounds):
            for workload in args.workloads:
                for engine in args.engines:  # A B A B
                    runs.append(run_once(engine, model, workload, args))
                    print(
                        f"{workload} {engine:12s} {runs[-1]['output_tokens_per_s']:8.1f} tokens/s"
                    )
    report(runs, args)


def report(runs: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print medians and ratios to the first engine's; keep all runs as JSON."""
    first = args.engines[0]
    for workload in args.workloads:
        medians = {
            engine: statistics.median(
                run["output_tokens_per_s"]
                for run in runs
                if (run["engine"], run["workload"]) == (engine, workload)
            )
            for engine in args.engines
        }
        for engine, tokens in medians.items():
            ratio = f"{first} is {medians[first] / tokens:.2f}x" if engine != first else ""
            print(f"{workload}  {engine:12s} {tokens:8.1f} output tokens/s  {ratio}")
    where = {
        "date": date.today().isoformat(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("batchinfer", "torch", "transformers")},
    }
    path = HERE / "results" / f"cpu-{args.dtype}-{where['date']}.json"
    path.parent.mkdir(exist_ok=True)
    for run in runs:
        del run["model"]
    path.write_text(json.dumps({"machine": where, "runs": runs}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
