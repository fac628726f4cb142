"""Shared-prefix attention on and off: rows under one prefix of 2,048 tokens, 8 samples each.

    python benchmarks/shared_prefix.py FOLDER [--rows 256] [--dtype float32] [--rounds 1]

Runs the same rows in turn with the prefixes that their sequences share told to the kernel and
without, in one process and on one model (``small`` of models.py with room for 4,096 positions).
Prints one JSON line with medians: output tokens/s and seconds of attention, of the steps in which
every sequence decodes.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from models import make_small
from workloads import FIRST_ID, LAST_ID

from batchinfer.config import ModelConfig, SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.request import Request
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.step_io.shared_prefix import PrefixTree
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.sampler import Sampler

BLOCK_SIZE, MAX_LEN = 16, 4096
PREFIX, OWN, OUTPUT, SAMPLES = 2048, 16, 12, 8


class NothingShared(PrefixTree):
    """Tells the kernel of no prefix."""

    def of_step(self, rows: Any) -> None:
        """Nothing."""


class TimedRunner(ModelRunner):
    """Sums up the time spent in attention."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.attention_s = 0.0
        attend = self._backend.attend

        def timed(*call: Any) -> torch.Tensor:
            began = time.perf_counter()
            out = attend(*call)
            self.attention_s += time.perf_counter() - began
            return out

        self._backend.attend = timed  # type: ignore[method-assign]


@dataclass(frozen=True)
class Measured:
    """Of the steps that only decode."""

    tokens: int
    seconds: float
    attention_s: float
    peak_blocks: int
    outputs: list[list[int]]


def run(loaded: LoadedModel, num_rows: int, *, shares: bool) -> Measured:
    """Generate ``OUTPUT`` tokens for every sample of every row."""
    num_sequences = num_rows * SAMPLES
    own_blocks = -(-(OWN + OUTPUT) // BLOCK_SIZE) + 1
    num_blocks = PREFIX // BLOCK_SIZE + num_sequences * own_blocks
    dtype = getattr(torch, loaded.dtype)
    cache = KVCache(loaded.layout(BLOCK_SIZE), num_blocks, torch.device("cpu"), dtype)
    pool = BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
    table = SequenceTable(num_sequences, MAX_LEN, BLOCK_SIZE)
    runner = TimedRunner(loaded.model, cache, Sampler())
    engine = Engine(Scheduler(pool, table, 2 * num_sequences), runner)
    if not shares:
        engine._prefixes = NothingShared(table)
    rng = np.random.default_rng(0)
    prefix = rng.integers(FIRST_ID, LAST_ID, PREFIX)
    for row in range(num_rows):
        prompt = np.concatenate([prefix, rng.integers(FIRST_ID, LAST_ID, OWN)]).astype(np.int32)
        params = SamplingParams(
            max_tokens=OUTPUT, n=SAMPLES, temperature=1.0, top_k=50, ignore_eos=True
        )
        engine.add_request(Request(row, prompt, params, (1, row)))
    tokens, seconds, attention_s, completions = 0, 0.0, 0.0, []
    while engine.num_unfinished:
        began, attention_began = time.perf_counter(), runner.attention_s
        outcome = engine.step()
        completions += outcome.completions
        stats = outcome.stats
        if stats is not None and stats.decode_tokens == num_sequences:
            tokens += num_sequences
            seconds += time.perf_counter() - began
            attention_s += runner.attention_s - attention_began
    completions.sort(key=lambda completion: completion.request.row_id)
    outputs = [list(o.token_ids) for completion in completions for o in completion.outputs]
    peak = max(completion.stats.peak_blocks for completion in completions)
    return Measured(tokens, seconds, attention_s, peak, outputs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Shared-prefix attention on and off.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    model = make_small(args.folder / f"small-{MAX_LEN}", max_positions=MAX_LEN)
    loaded = load_model(ModelConfig(str(model), dtype=args.dtype), device=torch.device("cpu"))
    run(loaded, 1, shares=True)
    on, off = [], []
    for _ in range(args.rounds):
        off.append(run(loaded, args.rows, shares=False))
        on.append(run(loaded, args.rows, shares=True))
        assert on[-1].outputs == off[-1].outputs, "sharing changed the output"

    def summary(runs: list[Measured]) -> dict[str, float]:
        return {
            "output_tokens_per_s": round(median(r.tokens / r.seconds for r in runs), 1),
            "attention_s": round(median(r.attention_s for r in runs), 3),
            "decode_s": round(median(r.seconds for r in runs), 3),
        }

    result: dict[str, Any] = {"rows": args.rows, "samples": SAMPLES, "dtype": args.dtype}
    result |= {"on": summary(on), "off": summary(off), "peak_blocks_of_a_row": on[0].peak_blocks}
    result["attention_ratio"] = round(result["off"]["attention_s"] / result["on"]["attention_s"], 2)
    result["tokens_ratio"] = round(
        result["on"]["output_tokens_per_s"] / result["off"]["output_tokens_per_s"], 2
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
