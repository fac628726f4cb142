"""Measures the engine's own time per step, with a runner that computes nothing.

    python benchmarks/host.py [--sequences 1024]

Prints median and mean processor time per call to ``Engine.step`` with nearly all sequences running:
for steps that only decode, and for steps that also start rows. Two engines are measured: an engine
that waits for each step's result, and an engine that schedules the next step before it reads the
last result. Rows have 100 to 1,023 prompt tokens and 100 to 1,023 output tokens. The pool is never
full.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchinfer.config import SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.request import Request
from batchinfer.engine.runner import Ready
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.step import Step, StepResult

BLOCK_SIZE, NUM_BLOCKS = 16, 200_000
STEP_TOKENS = 8192
TOKEN, EOS = 7, 5


class StubRunner:
    """Draws the same token for every sample."""

    def submit(self, step: Step) -> Ready:
        count = step.num_samples
        return Ready(
            StepResult(
                token_ids=np.full(count, TOKEN, np.int32),
                logprobs=np.full(count, -1.0, np.float32),
                nonfinite=np.zeros(count, np.bool_),
                ranks=None,
                top_token_ids=None,
                top_logprobs=None,
            )
        )


@dataclass(frozen=True)
class Timed:
    """Processor seconds of one step, and its sizes."""

    seconds: float
    num_running: int
    prefill_tokens: int


def steps(num_sequences: int, num_rows: int, *, runs_ahead: bool) -> Iterator[Timed]:
    """Run ``num_rows`` rows, up to ``num_sequences`` at a time, and yield the time of each step."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True)
    table = SequenceTable(num_sequences, 4096, BLOCK_SIZE)
    engine = Engine(Scheduler(pool, table, STEP_TOKENS), StubRunner(), runs_ahead=runs_ahead)
    rng = np.random.default_rng(0)
    for row in range(num_rows):
        prompt_tokens, output_tokens = rng.integers(100, 1024, 2).tolist()
        engine.add_request(
            Request(
                row_id=row,
                prompt_token_ids=rng.integers(8, 30_000, prompt_tokens).astype(np.int32),
                params=SamplingParams(max_tokens=output_tokens),
                rng_key=(0, row),
                eos_token_ids=frozenset({EOS}),
            )
        )
    while engine.num_unfinished:
        began = time.thread_time()
        stats = engine.step().stats
        seconds = time.thread_time() - began
        if stats is not None:
            yield Timed(seconds, stats.num_running, stats.prefill_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the host time per step.")
    parser.add_argument("--sequences", type=int, default=1024)
    sequences = parser.parse_args().sequences
    list(steps(16, 32, runs_ahead=False))  # warm-up: imports and first calls
    print("engine        steps        count  median ms  mean ms")
    for runs_ahead in (False, True):
        timed = list(steps(sequences, 2 * sequences, runs_ahead=runs_ahead))
        full = [step for step in timed if step.num_running >= 0.97 * sequences]
        for name, mixed in (("decode-only", False), ("mixed", True)):
            ms = [1e3 * step.seconds for step in full if (step.prefill_tokens > 0) == mixed]
            engine = "one ahead" if runs_ahead else "one at a time"
            print(
                f"{engine:13} {name:11} {len(ms):6} {np.median(ms):10.3f} {np.mean(ms):8.3f}"
                if ms
                else f"{engine:13} {name:11}      0"
            )


if __name__ == "__main__":
    main()
