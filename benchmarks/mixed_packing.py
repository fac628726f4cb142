"""Compares orders of rows with long prompts and rows with long answers, on a simulated H200.

.venv/bin/python benchmarks/mixed_packing.py [MIX ...] [--rows N] [--max-num-seqs N] [--out FILE]

Half of the rows of a mix have long prompts and short answers, and half have short prompts and long
answers. Prompts keep the GPU's arithmetic busy, and long answers its memory. Each half has its own
instruction, so in prefix order the two halves form two blocks. The command simulates a Qwen3-8B job
with each order, and prints:

- time_s and bound_s: the job's estimated seconds, and its seconds at the device's limits if the
  operators of a step run one after another, as in a plan;
- arithmetic_s and memory_s: seconds of the job's arithmetic at the peak rate, and of its memory
  traffic at the peak bandwidth, without activations. The longer of the two is the job's roofline;
- overlapped_s: the sum of the rooflines of all steps.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from result_files import write_results

from batchinfer.config import EngineConfig, SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.request import Request
from batchinfer.engine.runner import Pending
from batchinfer.engine.simulate.dry_run import make_dry_engine
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.engine.simulate.roofline import DEVICES, StepWork, step_seconds
from batchinfer.engine.step import Step
from tests.engine.simulate.test_roofline import QWEN3_8B

MODEL = {**QWEN3_8B, "max_position_embeddings": 40960}
MAX_NUM_BATCHED_TOKENS, USABLE = 16_384, 0.93  # as in configs/h200.yaml
BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE = 16, 16_384, 100_000
INSTRUCTION_TOKENS = 64
SPREAD = 0.5
"""Lengths are uniform between their mean times 1 - SPREAD and their mean times 1 + SPREAD."""


@dataclass(frozen=True)
class Mix:
    """Mean lengths in tokens of both halves, and the total number of rows."""

    long_prompt: int
    short_answer: int
    short_prompt: int
    long_answer: int
    rows: int


MIXES = {
    "prompts": Mix(8000, 100, 200, 1000, 3000),
    "even": Mix(2000, 50, 200, 2000, 3000),
    "answers": Mix(4000, 50, 200, 6000, 1000),
}
"""A mix that mostly computes, a mix that does much of both, and a mix that mostly reads memory."""
ORDERS = ("prompts first", "answers first", "alternating", "random")


def requests(mix: Mix) -> tuple[list[Request], list[Request]]:
    """Return the rows with long prompts, and the rows with long answers."""
    rng = np.random.default_rng(0)

    def half(start: int, prompt: int, answer: int) -> list[Request]:
        instruction = rng.integers(0, VOCAB_SIZE, INSTRUCTION_TOKENS, dtype=np.int32)
        made = []
        for row in range(start, start + mix.rows // 2):
            lengths = rng.uniform(1 - SPREAD, 1 + SPREAD, 2) * (prompt, answer)
            ids = rng.integers(0, VOCAB_SIZE, round(lengths[0]), dtype=np.int32)
            params = SamplingParams(max_tokens=round(lengths[1]), ignore_eos=True)
            made.append(Request(row, np.concatenate([instruction, ids]), params, (0, row)))
        return made

    return half(0, mix.long_prompt, mix.short_answer), half(
        mix.rows // 2, mix.short_prompt, mix.long_answer
    )


def in_order(prompts: list[Request], answers: list[Request], order: str) -> list[Request]:
    """Return both halves in one of ``ORDERS``."""
    if order == "alternating":
        return [each for pair in zip(prompts, answers, strict=True) for each in pair]
    both = [*answers, *prompts] if order == "answers first" else [*prompts, *answers]
    if order == "random":
        return [both[at] for at in np.random.default_rng(1).permutation(len(both))]
    return both


@dataclass(frozen=True)
class Simulated:
    """Seconds of a simulated job; see the module's docstring."""

    time_s: float
    bound_s: float
    arithmetic_s: float
    memory_s: float
    overlapped_s: float
    steps: int
    preempted: int
    cached_tokens: int


def simulate(rows: Sequence[Request], max_num_seqs: int) -> Simulated:
    """Run rows in this order on the simulated engine."""
    layout = KVLayout.from_config(MODEL, block_size=BLOCK_SIZE, dtype="bfloat16")
    cost, device = ModelCost.from_config(MODEL, "bfloat16"), DEVICES["h200"]
    assert device.memory_bytes is not None
    free = USABLE * device.memory_bytes - cost.weight_bytes
    engine, runner = make_dry_engine(
        EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
        cost,
        device,
        num_blocks=int(free // layout.bytes_per_block),
        max_model_len=MAX_MODEL_LEN,
    )
    # Fused kernels need not store activations.
    ideal = replace(cost, activations=0)
    only_arithmetic = replace(device, bandwidth=math.inf)
    only_memory = replace(device, flops={2: math.inf})
    arithmetic_s = memory_s = overlapped_s = 0.0
    submit = runner.submit

    def noted(step: Step) -> Pending:
        nonlocal arithmetic_s, memory_s, overlapped_s
        work = StepWork.of(step)
        arithmetic = step_seconds(ideal, only_arithmetic, work)
        memory = step_seconds(ideal, only_memory, work)
        arithmetic_s += arithmetic
        memory_s += memory
        overlapped_s += max(arithmetic, memory)
        return submit(step)

    runner.submit = noted  # type: ignore[method-assign]
    steps, preempted, cached = _run(engine, rows)
    times = runner.seconds, runner.bound_s, arithmetic_s, memory_s, overlapped_s
    return Simulated(*(round(each, 1) for each in times), steps, preempted, cached)


def _run(engine: Engine, rows: Sequence[Request]) -> tuple[int, int, int]:
    """Run all rows; return the number of steps, of preemptions and of cached prompt tokens."""
    for row in rows:
        engine.add_request(row)
    steps = preempted = cached = 0
    while engine.num_unfinished:
        outcome = engine.step()
        cached += sum(done.stats.cached_tokens for done in outcome.completions)
        if outcome.stats is not None:
            steps += 1
            preempted += outcome.stats.num_preempted
    return steps, preempted, cached


def main() -> None:
    """Simulate mixes with all orders; print a line for each, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mixes", nargs="*", default=list(MIXES), metavar="MIX")
    parser.add_argument("--rows", type=int, help="number of rows of each mix")
    parser.add_argument("--max-num-seqs", type=int, default=4096)
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    options = parser.parse_args()
    results: dict[str, Any] = {"model": "Qwen3-8B", "max_num_seqs": options.max_num_seqs}
    for name in options.mixes:
        mix = replace(MIXES[name], rows=options.rows or MIXES[name].rows)
        halves, results[name] = requests(mix), []
        print(f"{name}: {mix}", flush=True)
        for order in ORDERS:
            result = simulate(in_order(*halves, order), options.max_num_seqs)
            print(f"  {order:<14} {result}", flush=True)
            results[name].append({"order": order, **asdict(result)})
    if options.out is not None:
        write_results(options.out, results)


if __name__ == "__main__":
    main()
