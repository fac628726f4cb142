"""Replays are compared with plain steps before a job uses them."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels import decode_plan
from batchinfer.worker import replay_check
from batchinfer.worker.cuda_graphs.capture import Run
from batchinfer.worker.cuda_graphs.graph_sizes import Kind
from batchinfer.worker.replay_check import replays_are_right
from tests.worker.cuda_graphs.graph_bench import BLOCK_SIZE, NUM_LAYERS, Bench, eager
from tests.worker.on_triton import pretend_cuda

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KINDS: list[Kind] = ["mixed", "shared decode", "decode"]


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(decode_plan, "DECODE_PIECE", BLOCK_SIZE)
    monkeypatch.setattr(replay_check, "DECODE_PIECE", BLOCK_SIZE)
    monkeypatch.setattr(replay_check, "_LONG", BLOCK_SIZE + 12)


def wrong_replay(family: str, wrong: Kind | None, num_layers: int = NUM_LAYERS) -> Kind | None:
    """Capture the smallest graph of each kind that holds three sequences, and check them.

    Args:
        wrong: the kind of graph that freezes the logits of its capture.
    """
    bench = Bench(family, num_hidden_layers=num_layers)
    for kind in KINDS:
        sizes = [s for s in bench.graphs.sizes if s.kind == kind and s.sequences >= 3]
        size = min((s for s in sizes if s.tokens >= 9 or kind != "mixed"), key=lambda s: s.tokens)
        bench.graphs._capture = frozen if kind == wrong else eager
        bench.graphs.capture(size)
    lines: list[str] = []
    is_right = replays_are_right(bench.model, bench.cache, bench.graphs, None, lines.append)
    assert is_right == (lines == [])
    return next((kind for kind in KINDS if f"of {kind} steps" in "".join(lines)), None)


def frozen(run: Run) -> Run:
    logits, hidden = (tensor.clone() for tensor in run())
    return lambda: (logits, hidden)


@pytest.mark.parametrize("wrong", KINDS)
def test_a_graph_with_a_frozen_input_is_found(wrong: Kind) -> None:
    assert wrong_replay("llama", wrong) == wrong


@pytest.mark.parametrize(
    ("family", "num_layers"),
    [
        ("llama", 1),
        ("gemma2", 2),
        pytest.param("qwen3_5_text", 4, marks=pytest.mark.long),
        ("mamba2", 2),
    ],
)
def test_right_graphs_are_kept(family: str, num_layers: int) -> None:
    assert wrong_replay(family, None, num_layers) is None


def test_nothing_is_compared_in_a_pool_that_is_too_small() -> None:
    bench = Bench()
    bench.cache.num_blocks = 5
    before, lines = bench.cache.pool.clone(), list[str]()
    assert replays_are_right(bench.model, bench.cache, bench.graphs, None, lines.append)
    assert torch.equal(bench.cache.pool.nan_to_num(), before.nan_to_num())
    assert lines == ["CUDA graphs were not compared with plain steps, which needs 28 tokens"]


def test_a_job_starts_if_the_check_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(replay_check, "forward", fail)
    bench, lines = Bench(), list[str]()
    assert replays_are_right(bench.model, bench.cache, bench.graphs, None, lines.append)
    assert "no memory left" in lines[0]
