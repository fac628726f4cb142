"""Models with sliding windows keep only the blocks in a window, and choose the right tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.config import ModelConfig, SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.request import Request
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import load_model
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.sampler import Sampler
from tests.engine.invariants import check_scheduler
from tests.models import VOCAB_SIZE, make_checkpoint, tiny_model

CPU = torch.device("cpu")
SIZE, WINDOW, PROMPT, OUTPUT, CHUNK = 4, 9, 300, 40, 32
BLOCKS = -(-(PROMPT + OUTPUT - 1) // SIZE)  # 85
IN_WINDOW = 3  # 9 tokens lie in at most 3 blocks of 4
FAMILIES = {  # numbers of layer groups: full attention, windows
    "mistral": (0, 1),
    "gemma2": (1, 1),
    "gemma3_text": (1, 2),
    "gpt_oss": (1, 1),
    "cohere2": (1, 2),
    "qwen2": (1, 1),  # one C call runs its layers, if the processor supports it
}
_MIXED = ["full_attention", "sliding_attention"] * 2
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED}
}


@pytest.mark.parametrize(
    ("family", "layer_major"), [*((family, False) for family in FAMILIES), ("gemma3_text", True)]
)
def test_sliding_windows_bound_the_blocks_of_a_long_row(
    family: str, layer_major: bool, tmp_path: Path
) -> None:
    """A row takes 85 blocks for full attention, and 3 per window (up to 11 during the prompt)."""
    full, windowed = FAMILIES[family]
    changes = CHANGES.get(family, {}) | ({} if full != windowed else {"num_hidden_layers": 4})
    folder = make_checkpoint(family, tmp_path, **changes)
    loaded = load_model(ModelConfig(str(folder)), device=CPU)
    layout = loaded.layout(SIZE)
    assert layout.windows == (0,) * full + (WINDOW,) * windowed
    num_blocks = layout.slots_for(PROMPT + OUTPUT - 1, CHUNK)
    assert num_blocks == full * BLOCKS + windowed * 11
    cache = KVCache(layout, num_blocks, CPU, torch.float32, layer_major=layer_major)
    cache.blocks[:-1].fill_(torch.nan)  # old contents must not be read
    pool = BlockPool(num_blocks, SIZE, enable_prefix_caching=True, windows=layout.windows)
    scheduler = Scheduler(pool, SequenceTable(4, 512, SIZE, layout.windows), CHUNK)
    engine = Engine(scheduler, ModelRunner(loaded.model, cache, Sampler()))
    prompt = np.random.default_rng(0).integers(2, VOCAB_SIZE, PROMPT).astype(np.int32)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
    engine.add_request(Request(0, prompt, params, (0, 0)))
    completions, used = [], []
    while engine.num_unfinished:
        outcome = engine.step()
        check_scheduler(scheduler)
        completions += outcome.completions
        used += [outcome.stats.kv_blocks_used] if outcome.stats else []
    late = [BLOCKS * full + IN_WINDOW * windowed - blocks for blocks in used[-4:]]
    assert min(late) >= 0
    assert max(late) <= full + windowed
    assert completions[0].stats.peak_blocks <= num_blocks
    _assert_greedy(family, changes, prompt, completions[0].outputs[0].token_ids)


@torch.inference_mode()
def _assert_greedy(
    family: str, changes: dict[str, Any], prompt: np.ndarray, output: np.ndarray
) -> None:
    """Check that transformers would choose each token after its predecessors, except for ties."""
    ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))[None]
    logits = tiny_model(family, **changes)(ids).logits[0, -OUTPUT - 1 : -1]
    taken = logits[torch.arange(OUTPUT), ids[0, -OUTPUT:]]
    assert (logits.max(dim=1).values - taken).max() < 1e-4
