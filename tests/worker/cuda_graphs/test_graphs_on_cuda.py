"""Replayed CUDA graphs give the logits of eager steps.

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
from batchinfer.worker.cuda_graphs.capture import CudaCapture
from batchinfer.worker.cuda_graphs.step_graphs import StepGraphs
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.kv_cache import KVCache
from tests.devices import CPU_AND_CUDA, NEEDS_CUDA
from tests.models import VOCAB_SIZE, tiny_model
from tests.worker.on_triton import pretend_cuda
from tests.worker.step_maker import StepMaker

# Padding rows hold arbitrary values, which cause NumPy warnings in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MAX_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 9, 128, 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype] * float(expected.abs().max())
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_replays_give_the_eager_logits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps grow and shrink; heads have 128 values in bfloat16, like those of most models."""
    on_cuda = device == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    options: dict[str, Any] = {} if on_cuda else {"capture": lambda run: run}
    if not on_cuda:
        pretend_cuda(monkeypatch)
    register()
    model = tiny_model("qwen3", num_hidden_layers=2, head_dim=128).to(device, dtype)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    layout = KVLayout.from_config(
        model.config.to_dict(),  # type: ignore[union-attr, operator]
        block_size=BLOCK_SIZE,
        dtype=str(dtype).removeprefix("torch."),
    )
    fuse(model, layout, MAX_MODEL_LEN)
    cache = KVCache(layout, 64, torch.device(device), dtype)
    cache.pool[:64] = torch.nan
    graphs = StepGraphs(
        model, cache, max_num_seqs=MAX_SEQS, max_graph_tokens=128 if on_cuda else MAX_SEQS,
        max_model_len=MAX_MODEL_LEN, **options,
    )  # fmt: skip
    lines: list[str] = []
    graphs.capture_all(lines.append)
    assert graphs.num_captured == len(graphs.sizes), lines
    maker, ids = StepMaker(64, BLOCK_SIZE), np.random.default_rng(0)
    sequences = [
        maker.sequence(ids.integers(0, VOCAB_SIZE, length).tolist())
        for length in (20, 1, 33, 64, 5)
    ]
    step = maker.step([(s, len(s.token_ids)) for s in sequences])
    expected = forward(model, cache, CudaAttention(cache), step).clone()
    if on_cuda:  # prompt chunks with as many tokens as a captured graph
        check(forward(model, cache, CudaAttention(cache), step, graphs=graphs), expected)
    for count in (5, 2, 3, 1):
        for sequence in sequences[:count]:
            sequence.token_ids.append(int(ids.integers(VOCAB_SIZE)))
        step = maker.step([(sequence, 1) for sequence in sequences[:count]])
        expected = forward(model, cache, CudaAttention(cache), step).clone()
        assert graphs.size_for(step) is not None
        got = forward(model, cache, CudaAttention(cache), step, graphs=graphs)
        check(got, expected)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_captured_computations_share_memory_and_read_their_inputs(device: str) -> None:
    capture, replays = CudaCapture(), []
    inputs = [torch.zeros(size, device=device, dtype=torch.bfloat16) for size in (4096, 64)]
    for tensor in inputs:
        (tensor + 1).mul_(2)  # runs the computation before its capture, as ``capture`` requires
        replays.append(capture(lambda tensor=tensor: ((tensor + 1).mul_(2),)))
    for value in (1.0, 5.0):
        for tensor, replay in zip(inputs, replays, strict=True):
            tensor.fill_(value)
            (result,) = replay()
            assert (result == 2 * (value + 1)).all()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_failed_capture_is_an_error_and_later_captures_work(device: str) -> None:
    capture = CudaCapture()
    tensor = torch.ones(8, device=device)
    with pytest.raises(RuntimeError):
        capture(lambda: (tensor * tensor.sum().item(),))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    for factor in (2, 3):
        (result,) = capture(lambda factor=factor: (tensor * factor,))()
        assert (result == factor).all()
