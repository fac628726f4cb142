"""There are few graph sizes, and steps need little padding."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.config import EngineConfig, SamplingParams
from batchinfer.engine.request import Request
from batchinfer.engine.simulate.dry_run import make_dry_engine
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.engine.simulate.roofline import DEVICES
from batchinfer.worker.cuda_graphs.graph_sizes import GraphSizes, all_sizes, decode_sizes

# the shapes of Qwen3-0.6B
SMALL_MODEL = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
}


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
def test_decode_sizes(most: int, sizes: list[int]) -> None:
    assert decode_sizes(most) == sizes


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (7, 40), (64, 32), (1024, 8192)])
def test_every_small_step_and_the_largest_have_a_size(sequences: int, tokens: int) -> None:
    sizes = all_sizes(sequences, tokens)
    assert sizes == sorted(sizes, key=lambda size: size.tokens, reverse=True)
    there = GraphSizes(sizes)
    assert there.least("mixed", tokens, min(sequences, tokens)) is not None
    for count in range(1, min(64, tokens) + 1):
        for of in (1, min(count, sequences)):
            found = there.least("mixed", count, of)
            assert found.tokens >= count
            assert found.sequences >= of
    for of in range(1, min(sequences, tokens) + 1):
        found = there.least("decode", of, of)
        assert found.tokens <= (2 if of < 128 else 1.25) * of
    assert there.least("decode", 1025, 1025) is None


def test_a_step_that_needs_too_much_padding_has_no_graph() -> None:
    there = GraphSizes(all_sizes(1024, 8192))
    assert there.least("mixed", 5000, 300) is None
    assert there.least("mixed", 7000, 300) == ("mixed", 8192, 1024)


def test_steps_of_a_lost_size_use_the_next_larger_size() -> None:
    sizes = all_sizes(64, 1024)
    whole = GraphSizes(sizes)
    lost = whole.least("mixed", 500, 10)
    found = GraphSizes(size for size in sizes if size != lost).least("mixed", 500, 10)
    assert found.tokens == lost.tokens
    assert found.sequences > lost.sequences


def test_little_of_a_simulated_jobs_steps_is_padding() -> None:
    rng = np.random.default_rng(0)
    cost = ModelCost.from_config(SMALL_MODEL, "bfloat16")
    settings = EngineConfig(max_num_seqs=64)
    engine, runner = make_dry_engine(
        settings, cost, DEVICES["h200"], num_blocks=6000, max_model_len=2048
    )
    sizes = GraphSizes(all_sizes(settings.max_num_seqs, settings.max_num_batched_tokens))
    steps: list[tuple[int, int | None]] = []
    submit = runner.submit

    def note(step):  # type: ignore[no-untyped-def]
        decodes = bool((np.diff(step.query_starts) == 1).all())
        kind = "decode" if decodes else "mixed"
        size = sizes.least(kind, step.num_tokens, step.num_sequences)  # type: ignore[arg-type]
        steps.append((step.num_tokens, None if size is None else size.tokens))
        return submit(step)

    runner.submit = note  # type: ignore[method-assign]
    for row in range(200):
        prompt = rng.integers(0, 1000, rng.integers(30, 300), dtype=np.int32)
        params = SamplingParams(max_tokens=int(rng.integers(20, 150)), ignore_eos=True)
        engine.add_request(Request(row, prompt, params, rng_key=(0, row)))
    while engine.num_unfinished:
        engine.step()
    with_graphs = [(tokens, padded) for tokens, padded in steps if padded is not None]
    assert len(with_graphs) > 0.97 * len(steps)
    computed, padded = np.array(with_graphs).sum(axis=0)
    assert padded < 1.12 * computed
