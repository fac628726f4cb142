"""Long sequences: scaled positions as in transformers, and a context of 16,384 tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.attention.attention import ATTENTION_NAME, make_backend, register
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.model.weights import fix_longrope
from tests.models import VOCAB_SIZE, tiny_model
from tests.worker.step_maker import StepMaker

ROOT = Path(__file__).parents[2]
ORIGINAL, LONGEST, BLOCK_SIZE = 32, 256, 16

_THETA = {"rope_theta": 10000.0}
SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_type": "linear", "factor": 8.0}),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "yarn": (
        "qwen3",
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "longrope": (
        "phi3",
        {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
}


def scaled_model(name: str) -> torch.nn.Module:
    family, rope = SCALINGS[name]
    return tiny_model(
        family,
        max_position_embeddings=LONGEST,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=_THETA | rope,
    )


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("fused", [False, True])
def test_scaled_positions_equal_those_of_transformers(name: str, fused: bool) -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, LONGEST).tolist()
    with torch.inference_mode():
        expected = scaled_model(name)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    register()
    model: Any = scaled_model(name)
    model.set_attn_implementation(ATTENTION_NAME)
    layout = KVLayout.from_config(model.config.to_dict(), block_size=BLOCK_SIZE, dtype="float32")
    fix_longrope(model, LONGEST)
    if fused:
        assert fuse(model, layout, LONGEST)
    cache = KVCache(layout, LONGEST // BLOCK_SIZE, torch.device("cpu"), torch.float32)
    maker = StepMaker(LONGEST // BLOCK_SIZE, BLOCK_SIZE)
    sequence, backend = maker.sequence(ids), make_backend(cache)
    # The first chunk is shorter than the model's original context length, but its positions must
    # be scaled like those of later chunks.
    counts = [20, 100, LONGEST - 122, 1, 1]
    steps = [maker.step([(sequence, count)], every_logit=True) for count in counts]
    got = torch.cat([forward(model, cache, backend, step) for step in steps])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_a_long_prompt_has_the_right_logits_and_the_planned_memory() -> None:
    """The benchmark uses 131,072 tokens; an eighth of them takes a 64th of the work."""
    command = [sys.executable, str(ROOT / "benchmarks" / "long_context.py")]
    done = subprocess.run(
        [*command, "--tokens", "16384", "--outputs", "4"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kv_error"] < 5e-4
    assert found["logprob_error"] < 1e-4
    memory = found["memory"]
    used = ("weight", "adapter", "pool", "activation", "logits", "graph")
    planned = sum(memory[f"{part}_bytes"] for part in used)
    assert found["planned_mib"] == pytest.approx(planned / 2**20, abs=0.1)
    # Thread stacks, a library and the allocator's cache take memory too.
    assert found["taken_mib"] < found["planned_mib"] + 64
