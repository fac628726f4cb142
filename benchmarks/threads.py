"""How much longer rows take beside processes that use every core.

python benchmarks/threads.py FOLDER --dtype float32 --rounds 3

Runs W1 alone, beside one burner a core, and beside as many of the lowest priority (``nice -n 19``),
in turn in one process; before each measurement the same rows run once under the same load. Prints
medians, what they are times the time alone, and how many cores other processes used meanwhile: a
measurement during which they used some is worth little.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
from workloads import Row, workload

from batchinfer import LLM, SamplingParams

BURNER = (sys.executable, "-c", "while True: pass")
LOADS = {"alone": None, "burners": (), "nice burners": ("nice", "-n", "19")}


@contextmanager
def burners(prefix: Sequence[str] | None, count: int) -> Iterator[list[psutil.Process]]:
    """So many processes that burn a core each; none where ``prefix`` is None."""
    started = [subprocess.Popen([*prefix, *BURNER]) for _ in range(count) if prefix is not None]
    try:
        yield [psutil.Process(one.pid) for one in started]
    finally:
        for one in started:
            one.kill()
        for one in started:
            one.wait()


@dataclass(frozen=True)
class Measured:
    """A run of the rows."""

    seconds: float
    others: float
    """Cores that processes other than this one and its burners used."""


def measure(llm: LLM, rows: Sequence[Row], prefix: Sequence[str] | None, count: int) -> Measured:
    """Run the rows under a load twice; the second run counts."""
    params = [
        SamplingParams(max_tokens=row.output_len, temperature=0.0, ignore_eos=True) for row in rows
    ]
    prompts = [row.prompt for row in rows]
    with burners(prefix, count) as burning:
        llm.generate(prompts, params, use_tqdm=False)
        ours = [psutil.Process(), *burning]
        idle, used, began = _all_cores(), _used(ours), time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        others = (_all_cores() - idle - _used(ours) + used) / seconds
    return Measured(seconds, max(0.0, others))


def _all_cores() -> float:
    """Processor seconds used on this machine so far."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)  # guests are in user and nice


def _used(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for one in processes for times in [one.cpu_times()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for the model, 88 M parameters")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--scale", type=float, default=0.1, help="share of W1's rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burners", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    from models import make_small  # imports torch, and batchinfer has to be the first to do so

    rows = workload("W1", args.scale)
    model = make_small(args.folder / "small")
    llm = LLM(model, dtype=args.dtype, enable_prefix_caching=False)
    taken: dict[str, list[Measured]] = {name: [] for name in LOADS}
    for _ in range(args.rounds):
        for name, prefix in LOADS.items():
            taken[name].append(measure(llm, rows, prefix, args.burners))
    alone = median(one.seconds for one in taken["alone"])
    tokens = sum(row.output_len for row in rows)
    for name, runs in taken.items():
        seconds = median(one.seconds for one in runs)
        every = " ".join(f"{one.seconds:.2f}" for one in runs)
        others = ", ".join(f"{one.others:.2f}" for one in runs)
        print(
            f"{args.dtype}, {name}: {seconds:.2f} s ({every}), {tokens / seconds:.0f} tokens/s, "
            f"{seconds / alone:.2f} times alone; cores used by others: {others}"
        )


if __name__ == "__main__":
    main()
