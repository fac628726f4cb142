"""A pool that is too small: what it costs to recompute, to swap, and to choose.

    python benchmarks/swap.py FOLDER [--rows 16] [--share 0.2] [--dtype float32] [--rounds 3]

Runs the same rows (prompts of 32-160 tokens, 160 to generate) on ``small`` of models.py, in a pool
of a share of what they need together, with each ``engine.preemption`` in turn. The engine is told
that outputs are short, so that it starts too many rows and has to preempt. Prints one JSON line:
seconds (median over rounds), preemptions, tokens recomputed and blocks swapped; the outputs are
compared.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import torch
from models import VOCAB_SIZE, make_small
from workloads import FIRST_ID, LAST_ID

from batchinfer.config import ModelConfig, SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.request import Request
from batchinfer.engine.scheduler.preemption import Preemption, PreemptionPolicy
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.sampler import Sampler

BLOCK_SIZE, MAX_LEN, OUTPUT = 16, 2048, 160


def requests(num_rows: int) -> list[Request]:
    """Rows that a token could end which is never drawn."""
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=OUTPUT, stop_token_ids=[VOCAB_SIZE])
    prompts = [rng.integers(FIRST_ID, LAST_ID, rng.integers(32, 161)) for _ in range(num_rows)]
    return [
        Request(row, prompt.astype(np.int32), params, (1, row))
        for row, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class Run:
    """All rows, once."""

    seconds: float
    preemptions: int
    by_swap: int
    recomputed: int
    blocks_out: int
    blocks_in: int
    token_s: float
    block_copy_s: float
    outputs: list[list[int]]


def run(loaded: LoadedModel, rows: list[Request], share: float, preemption: Preemption) -> Run:
    """Generate for ``rows`` in a pool of a share of their need."""
    need = sum(-(-(row.num_prompt_tokens + OUTPUT) // BLOCK_SIZE) for row in rows)
    largest = max(-(-(row.num_prompt_tokens + OUTPUT) // BLOCK_SIZE) for row in rows)
    num_blocks = max(largest, int(need * share))
    dtype, num_host = getattr(torch, loaded.dtype), 0 if preemption == "recompute" else need
    layout = loaded.layout(BLOCK_SIZE)
    cache = KVCache(layout, num_blocks, torch.device("cpu"), dtype, num_host)
    cache.pool.zero_()
    pool = BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching=True, num_host_blocks=num_host)
    preemption_policy = PreemptionPolicy(preemption, cache.host.measure())
    scheduler = Scheduler(pool, SequenceTable(256, MAX_LEN, BLOCK_SIZE), 1024, preemption_policy)
    scheduler.output_lengths.observe(np.full(200_000, 2), np.ones(200_000, dtype=np.bool_))
    engine = Engine(scheduler, ModelRunner(loaded.model, cache, Sampler()))
    for row in rows:
        engine.add_request(row)
    began, steps, completions = time.perf_counter(), [], []
    while engine.num_unfinished:
        outcome = engine.step()
        completions += outcome.completions
        steps += [outcome.stats] if outcome.stats else []
    seconds = time.perf_counter() - began
    completions.sort(key=lambda completion: completion.request.row_id)
    return Run(
        seconds=seconds,
        preemptions=sum(step.num_preempted for step in steps),
        by_swap=sum(completion.stats.swap_preemptions for completion in completions),
        recomputed=sum(step.recomputed_tokens for step in steps),
        blocks_out=sum(step.swapped_out_blocks for step in steps),
        blocks_in=sum(step.swapped_in_blocks for step in steps),
        token_s=preemption_policy.token_s,
        block_copy_s=preemption_policy.block_copy_s,
        outputs=[output.token_ids.tolist() for done in completions for output in done.outputs],
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Recompute, swap and auto in a small pool.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = make_small(args.folder / "small")
    loaded = load_model(ModelConfig(str(model), dtype=args.dtype), device=torch.device("cpu"))
    rows = requests(args.rows)
    run(loaded, rows[:2], 1.0, "recompute")
    runs: dict[Preemption, list[Run]] = {choice: [] for choice in get_args(Preemption)}
    for _ in range(args.rounds):
        for choice, of_choice in runs.items():
            of_choice.append(run(loaded, rows, args.share, choice))
            assert of_choice[-1].outputs == runs["auto"][0].outputs, "the choice changed a row"
    result: dict[str, Any] = {"rows": args.rows, "share": args.share, "dtype": args.dtype}
    for choice, of_choice in runs.items():
        last = of_choice[-1]
        result[choice] = {
            "seconds": round(median(r.seconds for r in of_choice), 2),
            "preemptions": last.preemptions,
            "by_swap": last.by_swap,
            "recomputed": last.recomputed,
            "blocks_out": last.blocks_out,
            "blocks_in": last.blocks_in,
        }
    best = min(result[choice]["seconds"] for choice in ("recompute", "swap"))
    result["auto_over_best"] = round(result["auto"]["seconds"] / best, 3)
    result["token_us"] = round(1e6 * runs["auto"][-1].token_s)
    result["block_copy_us"] = round(1e6 * runs["auto"][-1].block_copy_s)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
