"""Decode steps over arrays that stay where they are: here a replay is the computation itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.step import SharedPrefixes
from batchinfer.kernels import decode_work, reference
from batchinfer.worker.attention.attention import ATTENTION_NAME, register
from batchinfer.worker.attention.triton import CudaAttention
from batchinfer.worker.cuda_graphs.capture import SyncWatch
from batchinfer.worker.cuda_graphs.decode_graphs import DecodeGraphs, Run, batch_sizes
from batchinfer.worker.cuda_graphs.inputs import DecodeInputs
from batchinfer.worker.forward import device_arrays, forward
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.memory import graph_bytes
from batchinfer.worker.transfer import to_device
from tests.models import VOCAB_SIZE, tiny_model
from tests.worker.on_triton import pretend_cuda, traced
from tests.worker.step_maker import HandSequence, StepMaker

# Rows that are padding hold whatever memory held; the interpreter's NumPy remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MAX_SEQS, MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE = 9, 96, 64, 16
NUM_LAYERS = 2


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)


def eager(run: Run) -> Run:
    """A capture that runs everything again; only tensors can tell it what has changed."""
    return run


class Bench:
    """A tiny model and a pool with some prefilled sequences."""

    def __init__(self, family: str = "llama", *, fused: bool = True, **changes: Any) -> None:
        register()
        self.model = tiny_model(family, num_hidden_layers=NUM_LAYERS, **changes)
        self.model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
        layout = KVLayout.from_config(
            self.model.config.to_dict(),  # type: ignore[union-attr, operator]
            block_size=BLOCK_SIZE,
            dtype="float32",
        )
        if fused:
            fuse(self.model, layout, MAX_MODEL_LEN)
        self.cache = KVCache(layout, NUM_BLOCKS, torch.device("cpu"), torch.float32)
        self.cache.pool[:NUM_BLOCKS] = torch.nan
        self.maker = StepMaker(NUM_BLOCKS, BLOCK_SIZE)
        self.graphs = DecodeGraphs(
            self.model,
            self.cache,
            max_num_seqs=MAX_SEQS,
            max_model_len=MAX_MODEL_LEN,
            capture=eager,
        )

    def prefilled(self, lengths: list[int], seed: int = 0) -> list[HandSequence]:
        """Sequences that have keys and values, random ones, of all but their last token."""
        ids = np.random.default_rng(seed)
        sequences = [self.maker.sequence(ids.integers(0, VOCAB_SIZE, n).tolist()) for n in lengths]
        parts = [(s, len(s.token_ids) - 1) for s in sequences if len(s.token_ids) > 1]
        if parts:
            slots = torch.from_numpy(self.maker.step(parts).slot_mapping)
            for layer in range(NUM_LAYERS):
                caches = self.cache.key(layer), self.cache.value(layer)
                sizes = [(len(slots), cache.shape[1], cache.shape[3]) for cache in caches]
                reference.kv_write(*map(torch.randn, sizes), *caches, slots)
        return sequences

    def plain(self, step: Any) -> torch.Tensor:
        return forward(self.model, self.cache, CudaAttention(self.cache), step)

    def replayed(self, step: Any) -> torch.Tensor:
        assert self.graphs.takes(step)
        return self.graphs.logits(step, to_device(device_arrays(step), torch.device("cpu")))


@settings(max_examples=1, phases=[Phase.explicit, Phase.generate])
@example(lengths=[20, 1, 33], seed=0)
@given(
    st.sampled_from([2, 5, 7]).flatmap(
        lambda size: st.lists(st.integers(1, 35), min_size=size, max_size=size)
    ),
    st.integers(min_value=0, max_value=9),
)
def test_a_replay_gives_the_plain_logits_and_touches_no_other_slot(
    lengths: list[int], seed: int
) -> None:
    bench = Bench()
    # What these leave behind in the arrays must not be followed.
    earlier = [(bench.maker.sequence([5]), 1) for _ in range(MAX_SEQS)]
    bench.replayed(bench.maker.step(earlier))
    step = bench.maker.step([(s, 1) for s in bench.prefilled(lengths, seed)])
    before = bench.cache.pool.clone()
    expected = bench.plain(step)
    computed = bench.cache.pool.clone()
    bench.cache.pool.copy_(before)
    got = bench.replayed(step)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    # Equal NaN: where nothing was to be written, nothing was.
    torch.testing.assert_close(bench.cache.pool, computed, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_launches_fix_nothing_that_changes_from_step_to_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    traces = []
    for lengths in ([1, 2, 3, 4, 5], [70, 17, 33, 64, 16, 2, 31, 5]):
        sequences = bench.prefilled(lengths)
        step = bench.maker.step([(sequence, 1) for sequence in sequences])
        bench.replayed(step)  # captures
        tensors = to_device(device_arrays(step), torch.device("cpu"))
        bench.graphs._inputs.load(tensors, 8)
        with traced(monkeypatch) as trace:
            bench.graphs._replays[8, False]()
        traces.append(trace.launches)
    assert traces[0] == traces[1]
    assert [launch.name for launch in traces[0]].count("_plan_kernel") == 1


def test_shared_prefixes_are_replayed_by_a_graph_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_work, "DECODE_PIECE", 64)
    bench = Bench()
    (leader,) = bench.prefilled([70])
    followers = [HandSequence([*leader.token_ids[:64], n, 7], leader.block_table[:4], 64)
                 for n in range(4)]  # fmt: skip
    bench.plain(bench.maker.step([(follower, 1) for follower in followers]))
    for count in (4, 2):  # the second is padded, over what the first left behind
        sequences = [leader, *followers[:count]]
        step = bench.maker.step([(sequence, 1) for sequence in sequences])
        expected = bench.plain(step)
        order = np.arange(count + 1, dtype=np.int32)[::-1].copy()
        lens = np.where(np.arange(count + 1), 64, 0).astype(np.int32)
        told = replace(step, shared_prefixes=SharedPrefixes(order, lens))
        with traced(monkeypatch) as trace:
            got = bench.replayed(told)
        assert "_shared_kernel" in trace.names
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        for sequence in sequences:
            sequence.token_ids.append(3)
    assert list(bench.graphs._replays) == [(8, True), (4, True)]


def test_the_same_size_is_captured_once() -> None:
    bench = Bench()
    captured: list[Run] = []
    bench.graphs._capture = lambda run: captured.append(run) or run  # type: ignore[func-returns-value]
    sequences = bench.prefilled([5, 6, 7])
    for _ in range(3):
        for sequence in sequences:
            sequence.token_ids.append(3)
        bench.replayed(bench.maker.step([(sequence, 1) for sequence in sequences]))
    assert len(captured) == 1


def test_logits_of_some_sequences_only() -> None:
    bench = Bench()
    sequences = bench.prefilled([9, 20, 33])
    sequences[1].token_ids.append(4)  # its next token is not its last
    step = bench.maker.step([(sequence, 1) for sequence in sequences])
    assert step.logits_indices.tolist() == [0, 2]
    torch.testing.assert_close(bench.replayed(step), bench.plain(step), atol=1e-5, rtol=1e-5)


def test_windows_and_softcaps_are_replayed() -> None:
    bench = Bench("gemma2")
    step = bench.maker.step([(s, 1) for s in bench.prefilled([70, 3, 12])])
    torch.testing.assert_close(bench.replayed(step), bench.plain(step), atol=1e-5, rtol=1e-5)


def test_steps_that_are_not_taken() -> None:
    bench = Bench()
    one, two = bench.prefilled([5, 40])
    assert bench.graphs.takes(bench.maker.step([(one, 1)]))
    three = bench.maker.sequence([1, 2, 3])
    assert not bench.graphs.takes(bench.maker.step([(two, 1), (three, 2)]))
    many = [(bench.maker.sequence([7]), 1) for _ in range(MAX_SEQS + 1)]
    assert not bench.graphs.takes(bench.maker.step(many))


def test_a_forward_pass_that_waits_for_the_device_is_not_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    layer: Any = bench.model.model.layers[0]  # type: ignore[union-attr, index]
    original = layer.mlp.forward
    layer.mlp.forward = lambda x: original(x) if x.abs().sum().item() >= 0 else x
    step = bench.maker.step([(s, 1) for s in bench.prefilled([5, 40])])
    got = bench.replayed(step)
    torch.testing.assert_close(got, bench.plain(step), atol=1e-5, rtol=1e-5)
    assert not bench.graphs.takes(step)
    assert "without CUDA graphs: it waits for the device (item)" in caplog.text


@pytest.mark.parametrize(
    ("compute", "waits"),
    [
        (lambda x: x[x > 0], {"index"}),
        (lambda x: torch.where(x > 0), {"where"}),
        (lambda x: x if x.sum() > 0 else -x, {"is_nonzero"}),
        (lambda x: torch.repeat_interleave(x, x.int()), {"repeat_interleave"}),
        (lambda x: torch.where(x > 0, x, -x)[torch.tensor([1, 0])] + x.cumsum(0), set()),
    ],
    ids=["index", "where", "if", "repeats", "nothing"],
)
def test_operations_that_wait_are_seen(compute: Any, waits: set[str]) -> None:
    watch = SyncWatch()
    x = torch.tensor([1.0, 2.0])
    with torch.inference_mode(), watch:
        compute(x)
    assert watch.seen == waits


def test_a_capture_that_fails_leaves_the_step_computed(caplog: pytest.LogCaptureFixture) -> None:
    def fail(run: Run) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing")

    bench = Bench()
    bench.graphs._capture = fail
    step = bench.maker.step([(s, 1) for s in bench.prefilled([5])])
    torch.testing.assert_close(bench.replayed(step), bench.plain(step), atol=1e-5, rtol=1e-5)
    assert not bench.graphs.takes(step)
    assert "not permitted" in caplog.text


def test_all_sizes_are_captured_ahead_without_touching_the_pool() -> None:
    bench = Bench()
    before = bench.cache.pool.clone()
    bench.graphs.capture_all()
    assert list(bench.graphs._replays) == [(size, False) for size in (9, 8, 4, 2, 1)]
    torch.testing.assert_close(bench.cache.pool, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (5, [1, 2, 4, 5]),
        (64, [1, 2, 4, 8, 16, 32, 64]),
        (100, [1, 2, 4, 8, 16, 32, 64, 96, 100]),
        (384, [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384]),
    ],
)
def test_batch_sizes(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


def test_padding_of_a_large_batch_is_little() -> None:
    sizes = batch_sizes(1024)
    assert len(sizes) < 30
    large = [(few, many) for few, many in pairwise(sizes) if few >= 128]
    assert all(many <= 1.25 * few for few, many in large)


def test_memory_of_graphs_is_that_of_the_largest_batch() -> None:
    config = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 150_000}
    layout = KVLayout(28, 8, 128, 128, 16, 2)
    sizes = [graph_bytes(layout, config, max_num_seqs=n, max_model_len=4096) for n in (64, 1024)]
    logits_and_tables = 2 * 2 * 150_000 + 4 * 256
    assert sizes[1] - sizes[0] > 960 * logits_and_tables
    assert sizes[1] < 2**31


def test_inputs_stay_where_they_are() -> None:
    inputs = DecodeInputs(8, 4, torch.device("cpu"))
    before = {name: tensor.data_ptr() for name, tensor in inputs.of(4).items()}
    bench = Bench(fused=False)
    step = bench.maker.step([(s, 1) for s in bench.prefilled([5, 40, 3])])
    tree = SharedPrefixes(np.array([2, 0, 1], np.int32), np.array([0, 64, 64], np.int32))
    arrays = device_arrays(replace(step, shared_prefixes=tree))
    inputs.load(to_device(arrays, torch.device("cpu")), 4)
    views = inputs.of(4)
    assert {name: tensor.data_ptr() for name, tensor in views.items()} == before
    assert views["query_starts"].tolist() == [0, 1, 2, 3, 3]
    assert views["slot_mapping"].tolist() == [*step.slot_mapping.tolist(), -1]
    assert views["context_lens"][:3].tolist() == [5, 40, 3]
    assert views["order"].tolist() == [2, 0, 1, 3]
    assert views["shared_lens"][:3].tolist() == [0, 64, 64]
