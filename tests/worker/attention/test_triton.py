"""The CUDA backend, in Triton's interpreter on CPU tensors, equals the CPU backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.step import SharedPrefixes, Step
from batchinfer.kernels import decode_plan
from batchinfer.worker import kv_cache
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.attention.cuda import BatchInvariantAttention, CudaAttention
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.forward import device_arrays
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.transfer import to_device
from tests.worker.on_triton import traced
from tests.worker.step_maker import HandSequence, StepMaker

LAYOUT = KVLayout(
    num_layers=3, num_kv_heads=2, key_width=16, value_width=16, block_size=16, element_bytes=4
)
PLAIN, WINDOWED = (AttentionVariant(0.25, window, 0.0, None) for window in (0, 5))


def begun(
    step_parts: list[tuple[int, int]], **pool: bool
) -> tuple[CudaAttention, Any, torch.Tensor]:
    """Begin a step with a random pool; return both backends and the step's queries.

    Args:
        step_parts: (tokens computed before, tokens of the step) of each sequence.
        pool: options of `begin`.
    """
    maker = StepMaker(32, 16)
    sequences = [(maker.sequence([1] * (before + new)), before, new) for before, new in step_parts]
    earlier = [(sequence, before) for sequence, before, _ in sequences if before]
    if earlier:
        maker.step(earlier)
    step = maker.step([(sequence, new) for sequence, _, new in sequences])
    return begin(step, **pool)


def begin(
    step: Step, *, fp8: bool = False, by_columns: bool = False, layer_major: bool = False
) -> tuple[CudaAttention, Any, torch.Tensor]:
    """Begin ``step`` with a random pool; return both backends and the step's queries.

    Args:
        fp8: the pool's dtype is float8.
        by_columns: the pool stores values by columns, as on a GPU.
    """
    torch.manual_seed(0)
    layout, cpu = replace(LAYOUT, fp8=fp8), torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "_transposes_values", lambda *_: by_columns)
        by_position = KVCache(layout, 32, cpu, torch.float32, layer_major=layer_major)
    own = KVCache(layout, 32, cpu, torch.float32, layer_major=layer_major)
    by_position.blocks[:32].copy_(torch.randn(by_position.blocks[:32].shape))
    for layer in range(LAYOUT.num_layers):
        blocks = by_position.key(layer)[:32], by_position.value(layer)[:32]
        rows = [block.float().transpose(1, 2).flatten(0, 1) for block in blocks]
        own.write(layer, *rows, torch.arange(len(rows[0])))
    tensors = to_device(device_arrays(step), torch.device("cpu"))
    backends = CudaAttention(by_position), make_backend(own)
    for backend in backends:
        backend.begin_step(step, tensors)
    return *backends, torch.randn(step.num_tokens, 4, 16)


@pytest.mark.parametrize("layer_major", [False, True], ids=["block_major", "layer_major"])
@pytest.mark.parametrize(
    ("fp8", "by_columns"), [(False, False), (True, False), (True, True)],
    ids=["as_the_model", "float8", "float8_by_columns"],
)  # fmt: skip
@pytest.mark.parametrize(
    "parts",
    [[(9, 1), (20, 1)], [(0, 7), (9, 1), (30, 4)], [(0, 7), (16, 20)]],
    ids=["decodes", "mixed", "chunks"],
)
def test_layers_with_two_windows_equal_the_cpu(
    parts: list[tuple[int, int]], fp8: bool, by_columns: bool, layer_major: bool
) -> None:
    cuda, cpu, query = begun(parts, fp8=fp8, by_columns=by_columns, layer_major=layer_major)
    for layer, variant in ((0, WINDOWED), (1, PLAIN), (2, WINDOWED)):
        got = cuda.attend(layer, query, variant)
        torch.testing.assert_close(got, cpu.attend(layer, query, variant), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [CudaAttention, BatchInvariantAttention])
def test_tokens_of_an_image_see_each_other(kind: type[CudaAttention]) -> None:
    maker = StepMaker(32, 16)
    chunk, decode = maker.sequence([1] * 40), maker.sequence([1] * 9)
    maker.step([(chunk, 8), (decode, 8)])
    step = maker.step([(chunk, 32), (decode, 1)])
    ends = np.array([*range(9, 13), *[37] * 25, *range(38, 41), 9], np.int32)
    first, cpu, query = begin(replace(step, query_ends=ends))
    cuda = kind(first._cache)
    cuda.begin_step(step, first._tensors)
    causal = replace(PLAIN, ignores_query_ends=True)
    outs = []
    for layer, variant in ((0, WINDOWED), (1, PLAIN), (1, causal)):
        outs.append(cuda.attend(layer, query, variant))
        expected = cpu.attend(layer, query, variant)
        torch.testing.assert_close(outs[-1], expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(outs[1], outs[2])


@pytest.mark.parametrize("kind", [CudaAttention, BatchInvariantAttention])
def test_windows_do_not_hide_prompts(kind: type[CudaAttention]) -> None:
    maker = StepMaker(32, 16)
    sequences = [maker.sequence([1] * count) for count in (40, 90, 90)]
    maker.step([(each, len(each.token_ids) - 1) for each in sequences[:2]])
    step = maker.step([(sequences[0], 1), (sequences[1], 1), (sequences[2], 90)])
    first, cpu, query = begin(replace(step, prompt_lens=np.array([30, 86, 50], np.int32)))
    cuda, variant = kind(first._cache), AttentionVariant(0.25, prompt_window=5)
    cuda.begin_step(step, first._tensors)
    got = cuda.attend(0, query, variant)
    torch.testing.assert_close(got, cpu.attend(0, query, variant), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(got, cuda.attend(0, query, WINDOWED))


@pytest.mark.parametrize("piece", [64, 512])
def test_shared_prefixes_are_read_once_without_a_window(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_plan, "DECODE_PIECE", piece)
    maker = StepMaker(32, 16)
    first = maker.sequence([1] * 100)
    maker.step([(first, 99)])
    others = [HandSequence([1] * n, first.block_table[:4], 64) for n in (80, 90)]
    maker.step([(others[0], 15), (others[1], 25)])
    shared = SharedPrefixes(np.array([2, 0, 1], np.int32), np.array([0, 64, 64], np.int32))
    step = maker.step([(sequence, 1) for sequence in (first, *others)])
    cuda, cpu, query = begin(replace(step, shared_prefixes=shared))
    with traced(monkeypatch) as trace:
        got = [cuda.attend(layer, query, v) for layer, v in ((0, WINDOWED), (1, PLAIN))]
    assert trace.names.count("_shared_kernel") == (1 if piece == 64 else 0)
    for layer, variant in ((0, WINDOWED), (1, PLAIN)):
        expected = cpu.attend(layer, query, variant)
        torch.testing.assert_close(got[layer], expected, atol=1e-5, rtol=1e-5)


def test_attending_twice_gives_the_same_output() -> None:
    cuda, _, query = begun([(9, 1), (20, 1)])
    first, again = (cuda.attend(1, query, PLAIN) for _ in range(2))
    np.testing.assert_array_equal(first, again)
