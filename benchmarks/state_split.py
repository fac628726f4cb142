"""Compares one pool for KV and recurrent state with pools that split the memory in advance.

.venv/bin/python benchmarks/state_split.py [ROWS]

Simulates jobs of Qwen3.6-35B-A3B on an H200. A split pool reserves the states of a fixed number of
sequences, and uses the rest of the memory for KV. Prints the estimated seconds of each job, and the
largest number of sequences that ran at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batchinfer.config import EngineConfig, SamplingParams
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.request import Request
from batchinfer.engine.simulate.dry_run import make_dry_engine
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.engine.simulate.roofline import DEVICES
from tests.engine.fake import run_all

MODEL: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 40,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "vocab_size": 248320,
}
JOBS = {"short": ((100, 100),), "long": ((12_000, 500),), "mixed": ((100, 100), (12_000, 500))}
"""Each job's pairs (prompt tokens, answer tokens), which the job's rows use in turn."""
SPLITS = (128, 256, 512)
"""Numbers of sequences for which a split pool reserves states."""
MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 1024, 16_384, 16
USABLE = 0.9
"""Share of the GPU's memory for weights and pool."""


def requests(lengths: tuple[tuple[int, int], ...], rows: int) -> Iterator[Request]:
    """Yield requests with random tokens, which share no prefix."""
    ids = np.random.default_rng(0)
    for row in range(rows):
        prompt, answer = lengths[row % len(lengths)]
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        yield Request(row, ids.integers(0, 10_000, prompt, dtype=np.int32), params, (0, row))


def main(rows: int) -> None:
    """Print a line for each job and each division of the memory."""
    layout = KVLayout.from_config(MODEL, block_size=BLOCK_SIZE, dtype="bfloat16")
    cost, device = ModelCost.from_config(MODEL, "bfloat16"), DEVICES["h200"]
    free = USABLE * device.memory_bytes - cost.weight_bytes
    num_slots, per_state = int(free // layout.bytes_per_block), layout.slots_per_state
    print(f"{num_slots} slots; a state takes {per_state}")
    for job, lengths in JOBS.items():
        for states in (None, *SPLITS):
            taken = 0 if states is None else states * per_state
            if taken >= num_slots:
                continue
            engine, runner = make_dry_engine(
                EngineConfig(
                    max_num_seqs=states or MAX_NUM_SEQS,
                    block_size=BLOCK_SIZE,
                    max_num_batched_tokens=8192,
                ),
                cost,
                device,
                num_blocks=num_slots - taken,
                max_model_len=MAX_MODEL_LEN,
                slots_per_state=per_state if states is None else 0,
            )
            _, steps = run_all(engine, list(requests(lengths, rows)))
            name = "one pool" if states is None else f"split for {states} states"
            running = max(step.num_running for step in steps)
            preempted = sum(step.num_preempted for step in steps)
            print(
                f"{job:<6} {name:<22} {runner.seconds:7.1f} s, {running:4} at once, "
                f"{preempted} preempted",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
