"""Step graphs on a CPU, where a replay runs the computation again on inputs at fixed addresses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from batchinfer.engine.step import ScoredTokens, SharedPrefixes, Step
from batchinfer.kernels import decode_plan
from batchinfer.worker.cuda_graphs import graph_sizes
from batchinfer.worker.cuda_graphs.capture import Run
from batchinfer.worker.cuda_graphs.graph_sizes import GraphSize
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.transfer import HostCopy
from tests.lora import make_adapter
from tests.models import tiny_model
from tests.worker.cuda_graphs.graph_bench import NUM_LAYERS, Bench
from tests.worker.on_triton import pretend_cuda, traced
from tests.worker.step_maker import HandSequence
from tests.worker.test_model_runner import greedy

# Padding rows hold arbitrary values, which cause NumPy warnings in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)


@pytest.fixture
def no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``HostCopy`` keep the tensor itself: without a device there is no pinned memory."""

    def keep(self: HostCopy, tensor: torch.Tensor) -> None:
        self._event, self._host = None, tensor

    monkeypatch.setattr(HostCopy, "__init__", keep)


def leave_something_behind(bench: Bench, size: GraphSize) -> None:
    """Fill the graph's inputs with a step of other sequences, which must not affect later steps."""
    if size.kind == "mixed":
        parts = [(bench.maker.sequence([5] * (size.tokens - size.sequences + 1)), 10**6)]
        parts += [(bench.maker.sequence([5]), 1) for _ in range(size.sequences - 1)]
    else:
        parts = [(bench.maker.sequence([5]), 1) for _ in range(size.sequences)]
    step = bench.maker.step([(s, min(count, len(s.token_ids))) for s, count in parts])
    bench.replayed(step)


def every_token(bench: Bench, parts: list[tuple[int, int]], seed: int = 0) -> Step:
    """Return a step of new sequences.

    Args:
        parts: for each sequence: (tokens computed before, tokens to compute now).
    """
    sequences = bench.partly_filled(parts, seed)
    return bench.maker.step([(s, new) for s, (_, new) in zip(sequences, parts, strict=True)])


@settings(max_examples=1, phases=[Phase.explicit, Phase.generate])
@example(lengths=[20, 1, 33], seed=0)
@given(
    st.sampled_from([2, 5, 7]).flatmap(
        lambda size: st.lists(st.integers(1, 35), min_size=size, max_size=size)
    ),
    st.integers(min_value=0, max_value=9),
)
def test_a_decode_step_gives_the_plain_logits_and_touches_no_other_slot(
    lengths: list[int], seed: int
) -> None:
    bench = Bench()
    step = bench.maker.step([(s, 1) for s in bench.prefilled(lengths, seed)])
    leave_something_behind(bench, bench.size_of(step))
    bench.compare(step)


@pytest.mark.long
@settings(max_examples=1, phases=[Phase.explicit, Phase.generate])
@example(parts=[(19, 1), (0, 1), (7, 6), (32, 5), (0, 3)], seed=0)  # decodes and chunks
@example(parts=[(0, 2)], seed=1)  # a step of the smallest size
# A step of the largest size, without padding
@example(parts=[(17, 1)] * 4 + [(0, 29), (3, 2), (50, 2), (9, 1)], seed=2)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=4),
    st.integers(min_value=0, max_value=9),
)
def test_a_mixed_step_gives_the_plain_logits_and_touches_no_other_slot(
    parts: list[tuple[int, int]], seed: int
) -> None:
    bench = Bench()
    step = every_token(bench, [*parts, (4, 2)], seed)
    size = bench.size_of(step)
    assert size.kind == "mixed"
    leave_something_behind(bench, size)
    bench.compare(step)


@pytest.mark.parametrize("family", ["gemma2", pytest.param("gpt2", marks=pytest.mark.long)])
def test_windows_softcaps_and_other_families_are_replayed(family: str) -> None:
    bench = Bench(family, num_hidden_layers=2)
    bench.compare(bench.maker.step([(s, 1) for s in bench.prefilled([70, 3, 12])]))
    bench.compare(every_token(bench, [(40, 1), (30, 7), (2, 1)]))


@pytest.mark.long
def test_layers_that_attend_within_chunks_are_replayed() -> None:
    bench = Bench("llama4_text", num_hidden_layers=3)
    bench.compare(bench.maker.step([(s, 1) for s in bench.prefilled([70, 3, 33, 32])]))
    bench.compare(every_token(bench, [(40, 1), (25, 7), (64, 5)]))
    crossing = every_token(bench, [(40, 1), (25, 8)])
    bench.graphs.capture(bench.size_of(crossing))
    assert bench.graphs.size_for(crossing) is None


@pytest.mark.long
def test_launches_fix_nothing_that_changes_from_step_to_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for first, second in (
        ([(n, 1) for n in (0, 1, 2, 3, 4)], [(n, 1) for n in (69, 16, 32, 63, 15, 1, 30, 4)]),
        ([(0, 9), (0, 4)], [(40, 4), (1, 1), (30, 7)]),
    ):
        bench, traces = Bench(num_hidden_layers=2), []
        for parts in (first, second):
            step = every_token(bench, parts)
            bench.replayed(step)  # also captures the graph
            with traced(monkeypatch) as trace:
                bench.graphs._replays[bench.size_of(step)]()
            traces.append(trace)
        assert len(bench.graphs._replays) == 1
        assert traces[0].launches == traces[1].launches
        assert traces[0].names.count("_plan_kernel") == 1


def fed_by_samples(step: Step, samples: list[int]) -> Step:
    """Return ``step`` with samples of the previous step as its first tokens."""
    previous = np.full(step.num_tokens, -1, dtype=np.int32)
    previous[: len(samples)] = samples
    return replace(step, previous_sample=previous)


def test_the_device_inserts_tokens_of_the_previous_step() -> None:
    bench = Bench()
    for parts in ([(20, 1), (3, 1), (40, 1)], [(20, 1), (3, 1), (0, 9)]):
        step = fed_by_samples(every_token(bench, parts), [2, 0])
        bench.compare(step, torch.tensor([11, 5, 17]))


def test_shared_prefixes_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "DECODE_PIECE", 64)
    bench = Bench()
    (leader,) = bench.prefilled([70])
    followers = [HandSequence([*leader.token_ids[:64], n, 7], leader.block_table[:4], 64)
                 for n in range(4)]  # fmt: skip
    bench.plain(bench.maker.step([(follower, 1) for follower in followers]))
    (other,) = bench.partly_filled([(5, 9)])
    # The second step is padded and overwrites the first step's inputs; the third also has a chunk.
    for count, others in ((4, []), (2, []), (3, [(other, 4)])):
        sequences = [leader, *followers[:count]]
        step = bench.maker.step([(sequence, 1) for sequence in sequences] + others)
        expected = bench.plain(step)
        order = np.arange(count + 1, dtype=np.int32)[::-1].copy()
        order = np.concatenate([order, np.arange(count + 1, step.num_sequences, dtype=np.int32)])
        lens = np.zeros(step.num_sequences, np.int32)
        lens[1 : count + 1] = 64
        with_prefixes = replace(step, shared_prefixes=SharedPrefixes(order, lens))
        with traced(monkeypatch) as trace:
            got = bench.replayed(with_prefixes)
        assert "_shared_kernel" in trace.names
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        for sequence in sequences:
            sequence.token_ids.append(3)
    kinds = [size.kind for size in bench.graphs._replays]
    assert kinds == ["shared decode", "shared decode", "mixed"]


def test_scored_tokens_equal_those_of_a_plain_step(no_pinned_memory: None) -> None:
    bench = Bench()
    runners = [ModelRunner(bench.model, bench.cache, greedy, g) for g in (bench.graphs, None)]
    step = every_token(bench, [(20, 1), (0, 9), (12, 5)])
    bench.graphs.capture(bench.size_of(step))
    rows = np.array([1, 2, 3, 8, 11], dtype=np.int32)
    asked = ScoredTokens(rows, np.array([4, 9, 1, 0, 30], dtype=np.int32), np.full(5, 2, np.int32))
    scored = [runner.submit(replace(step, scored=asked)).result() for runner in runners]
    assert scored[0].token_ids.tolist() == scored[1].token_ids.tolist()
    got, expected = scored[0].scored, scored[1].scored
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_array_equal(got.top_token_ids, expected.top_token_ids)


@pytest.mark.long
def test_rows_with_adapters_equal_peft_in_any_batch(tmp_path: Path) -> None:
    base = {"num_hidden_layers": NUM_LAYERS}
    configs: list[dict[str, Any]] = [
        {"target_modules": "all-linear", "r": 4, "lora_alpha": 8},
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 3},
    ]
    alone: list[Any] = [tiny_model("llama", **base)]
    for seed, config in enumerate(configs, start=1):
        folder = tmp_path / str(seed)
        alone.append(make_adapter(tiny_model("llama", **base), folder, seed=seed, **config))
    bench = Bench(adapters={"one": str(tmp_path / "1"), "two": str(tmp_path / "2")})
    sequences = bench.partly_filled([(0, n) for n in (13, 5, 1, 9)])
    numbers = [2, 0, 1, 2]
    for with_adapters in (numbers, [0, 0, 0, 0], [1, 1, 1, 1]):
        # Run prompts, then decodes. The next iteration does the same with other adapters.
        for sequence in sequences:
            sequence.num_computed = 0
        for tokens in (10**6, 1):
            step = bench.maker.step(
                [(s, min(tokens, len(s.token_ids) - s.num_computed)) for s in sequences]
            )
            if any(with_adapters):
                step = replace(step, adapters=np.array(with_adapters, dtype=np.int32))
            got = bench.replayed(step)
            for sequence, adapter, logits in zip(sequences, with_adapters, got, strict=True):
                ids = torch.tensor([sequence.token_ids])
                with torch.inference_mode():
                    expected = alone[adapter](input_ids=ids).logits[0, -1]
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
                sequence.token_ids.append(7)
        for sequence in sequences:
            del sequence.token_ids[-2:]


def test_a_step_with_too_many_chunks_has_no_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_sizes, "_CHUNKS", 2)
    bench = Bench()
    for chunks in (2, 3):
        step = every_token(bench, [(3, 2)] * chunks + [(5, 1)] * (9 - chunks))
        bench.graphs.capture(bench.size_of(step))
        assert (bench.graphs.size_for(step) is None) == (chunks == 3)
        if chunks == 2:
            bench.compare(step)


def test_steps_with_more_logits_than_sequences_use_a_larger_size() -> None:
    bench = Bench()
    sequences = bench.partly_filled([(0, 2)])
    step = bench.maker.step([(sequences[0], 2)], every_logit=True)
    for size in bench.graphs.sizes:
        if size.kind == "mixed" and size.tokens == 16:
            bench.graphs.capture(size)
    size = bench.graphs.size_for(step)
    assert size.sequences >= 2
    torch.testing.assert_close(
        bench.graphs.logits(step, size), bench.plain(step), atol=1e-5, rtol=1e-5
    )


def test_capturing_all_sizes_does_not_change_the_pool() -> None:
    bench, lines, clock = Bench(), list[str](), itertools.count(step=2)
    bench.graphs.sizes = [size for size in bench.graphs.sizes if size.tokens <= 16]
    before = bench.cache.pool.clone()
    bench.graphs.capture_all(lines.append, lambda: float(next(clock)))
    assert list(bench.graphs._replays) == bench.graphs.sizes
    torch.testing.assert_close(bench.cache.pool, before, atol=0, rtol=0, equal_nan=True)
    count = len(bench.graphs.sizes)
    assert lines[0] == f"CUDA graphs: 2 of {count} sizes captured"
    assert lines[-1].startswith(f"CUDA graphs: {count} sizes captured in ")


@pytest.mark.long
def test_a_failed_capture_loses_only_its_size() -> None:
    failures = {
        ("mixed", 16): RuntimeError("operation not permitted when stream is capturing"),
        ("decode", 4): torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    }
    bench, lines = Bench(), list[str]()

    def capture(run: Run) -> Run:
        size = bench.graphs.sizes[num_tried.__next__()]
        error = failures.get((size.kind, size.tokens))
        if error is not None:
            raise error
        return run

    num_tried = itertools.count()
    bench.graphs._capture = capture
    bench.graphs.capture_all(lines.append)
    assert len(bench.graphs._replays) == len(bench.graphs.sizes) - 4
    assert (
        "CUDA graphs could not be captured for steps of 4 tokens in 4 sequences: CUDA out of memory"
        in "".join(lines)
    )
    assert "not permitted" in "".join(lines)
    # The graph of the next larger size runs such steps.
    step = every_token(bench, [(5, 1), (20, 1), (9, 1)])
    size = bench.graphs.size_for(step)
    assert size == ("decode", 8, 8)
    torch.testing.assert_close(
        bench.graphs.logits(step, size), bench.plain(step), atol=1e-5, rtol=1e-5
    )
    step = every_token(bench, [(5, 1), (20, 4)])
    size = bench.graphs.size_for(step)
    assert size.tokens == 32


def test_a_forward_pass_that_waits_for_the_device_is_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, lines = Bench(), list[str]()
    layer: Any = bench.model.model.layers[0]  # type: ignore[union-attr, index]
    original = layer.mlp.forward
    monkeypatch.setattr(
        layer.mlp, "forward", lambda x: original(x) if x.abs().sum().item() >= 0 else x
    )
    bench.graphs.capture_all(lines.append)
    assert bench.graphs.num_captured == 0
    assert lines == [
        "steps run without CUDA graphs, because the model makes the host wait for the device (item)"
    ]
