"""With Triton kernels and CUDA graphs, recurrent models give the same logits as transformers.

On a CPU, Triton's interpreter runs the kernels in float32, and a replay repeats the computation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.attention.attention import ATTENTION_NAME, register
from batchinfer.worker.attention.cuda import CudaAttention
from batchinfer.worker.cuda_graphs.graph_sizes import GraphSize
from batchinfer.worker.cuda_graphs.step_graphs import StepGraphs
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.recurrent.patch_layers import page_recurrent_state
from tests.devices import CPU_AND_CUDA
from tests.models import VOCAB_SIZE, tiny_model
from tests.worker.on_triton import pretend_cuda
from tests.worker.step_maker import StepMaker

# Padding rows hold arbitrary values, which cause NumPy warnings in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NUM_SLOTS, MAX_SEQS, MAX_GRAPH_TOKENS, MAX_MODEL_LEN = 256, 4, 8, 64


@pytest.mark.parametrize("device", CPU_AND_CUDA)
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_text",
        pytest.param("nemotron_h", marks=pytest.mark.long),
        pytest.param("lfm2", marks=pytest.mark.long),
        pytest.param("kimi_linear", marks=pytest.mark.long),
        pytest.param("jamba", marks=pytest.mark.long),
        pytest.param("mamba2", marks=pytest.mark.long),
        pytest.param("falcon_mamba", marks=pytest.mark.long),
    ],
)
def test_steps_and_graphs_give_transformers_logits(
    family: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_of = tiny_model(family).to(device)
    model: Any = tiny_model(family).to(device)
    ids = np.random.default_rng(0)
    rows = [ids.integers(0, VOCAB_SIZE, length).tolist() for length in (7, 4, 1)]
    longer = [row + ids.integers(0, VOCAB_SIZE, 2).tolist() for row in rows]
    with torch.inference_mode():
        expected = [expected_of(torch.tensor([row], device=device)).logits[0] for row in longer]
    if device == "cpu":
        pretend_cuda(monkeypatch)
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    page_recurrent_state(model)
    layout = KVLayout.from_config(model.config.to_dict(), block_size=16, dtype="float32")
    fuse(model, layout, MAX_MODEL_LEN)
    cache = KVCache(layout, NUM_SLOTS, torch.device(device), torch.float32)
    cache.pool[:NUM_SLOTS] = torch.nan
    options: dict[str, Any] = {"capture": lambda run: run} if device == "cpu" else {}
    graphs = StepGraphs(
        model,
        cache,
        max_num_seqs=MAX_SEQS,
        max_graph_tokens=MAX_GRAPH_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        **options,
    )
    maker = StepMaker(
        NUM_SLOTS, 16, slots_per_state=layout.slots_per_state, attends=bool(layout.windows)
    )
    sequences = [maker.sequence(row) for row in rows]
    # Run a chunk of the first prompt, then its rest with the other prompts in a padded step.
    forward(model, cache, CudaAttention(cache), maker.step([(sequences[0], 5)]))
    parts = [(sequences[0], 2), (sequences[1], 4), (sequences[2], 1)]
    mixed = GraphSize("mixed", MAX_GRAPH_TOKENS, MAX_SEQS)
    graphs.capture(mixed)
    first = graphs.logits(maker.step(parts), mixed)
    check(first, [logits[len(row) - 1] for logits, row in zip(expected, rows, strict=True)])
    sizes = [size for size in graphs.sizes if size.sequences > len(sequences)]
    graphs.capture(sizes[-1])  # with padding sequences
    for drawn in range(2):
        for sequence, row in zip(sequences, longer, strict=True):
            sequence.token_ids.append(row[len(sequence.token_ids)])
        got = graphs.logits(maker.step([(sequence, 1) for sequence in sequences]), sizes[-1])
        check(got, [logits[len(row) + drawn] for logits, row in zip(expected, rows, strict=True)])


def check(got: torch.Tensor, expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=1e-4)
