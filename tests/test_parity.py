"""Greedy jobs on the whole engine choose the same tokens as transformers' models."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from batchinfer.config import ModelConfig
from batchinfer.engine.step import SharedPrefixes
from batchinfer.engine.step_io import shared_prefix
from batchinfer.worker.loader import LoadedModel, load_model
from tests.models import LATENT_FAMILIES, make_checkpoint, tiny_model
from tests.parity import CPU, OUTPUT_TOKENS, Setup, assert_greedy, prompts, run, tokens_of

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",  # sliding window of 9, shorter than the prompts
    "gemma2",  # softcap
    "gemma3_text",
    "gpt_oss",  # sinks
    "qwen3_moe",
    "phi3",
    "gpt2",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that loads a family's tiny checkpoint, each only once."""

    @functools.cache
    def load(family: str) -> LoadedModel:
        folder = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return load_model(ModelConfig(str(folder)), device=CPU)

    return load


@functools.cache
def eager(family: str) -> torch.nn.Module:
    """Return transformers' model with the same weights."""
    return tiny_model(family)


SETUPS = {
    "plain": Setup(),
    "block_size_1": Setup(block_size=1),
    "block_size_32": Setup(block_size=32),
    "no_prefix_caching": Setup(caching=False),
    "three_samples": Setup(n=3),
    "chunks_of_7": Setup(max_tokens=7),
    "rows_preempted": Setup(block_size=4, pool_tokens=100, preempt_every=3, misleading=True),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str, setup: Setup, checkpoint) -> None:
    completions, steps = run(checkpoint(family), setup)
    assert_greedy(eager(family), completions)
    distinct = sum(len(prompt) for prompt in prompts()) - 2 * 37 - 2 * 21
    if setup.caching and not setup.n > 1 and setup.pool_tokens > 1000 and setup.max_tokens > 7:
        assert sum(step.prefill_tokens for step in steps) <= distinct + 9


@pytest.mark.parametrize("setup", ["chunks_of_7", "rows_preempted"])
@pytest.mark.parametrize(
    "family",
    [
        "gemma4_text",  # wider heads in full attention, layers that use another layer's KV
        "gemma3n_text",  # layers that use another layer's KV
        "mimo_v2_flash",  # fewer heads in full attention, values narrower than keys
        "llama4_text",
    ],
)
def test_families_with_different_kv_per_layer(family: str, setup: str, checkpoint) -> None:
    completions, _ = run(checkpoint(family), SETUPS[setup])
    assert_greedy(eager(family), completions)


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_latents_equal_transformers_and_expanded_keys_and_values(
    family: str, tmp_path: Path
) -> None:
    """Run with two block sizes, in chunks of 7 tokens, and with a pool that holds few rows."""
    model = ModelConfig(str(make_checkpoint(family, tmp_path)))
    latent = load_model(model, device=CPU, latent=True)
    assert latent.layout(16).bytes_per_token == 3 * (16 + 4) * 4
    outputs = []
    for setup in (SETUPS["chunks_of_7"], SETUPS["rows_preempted"]):
        completions, _ = run(latent, setup)
        assert_greedy(eager(family), completions)
        outputs.append(tokens_of(completions))
    if family in ("deepseek_v2", "minicpm3"):  # with experts, and without
        expanded = load_model(model, device=CPU)
        assert expanded.layout(16).bytes_per_token > 3 * latent.layout(16).bytes_per_token
        outputs.append(tokens_of(run(expanded, SETUPS["chunks_of_7"])[0]))
    assert all(output == outputs[0] for output in outputs)


AHEAD = {
    "plain": Setup(runs_ahead=True),
    "three_samples": Setup(runs_ahead=True, n=3),
    "chunks_of_7": Setup(runs_ahead=True, max_tokens=7),
}
CROWDED = {
    "llama": Setup(runs_ahead=True, block_size=4, pool_tokens=100, misleading=True),
    "gpt_oss": Setup(  # a row takes 18 slots, and 6 in two windows
        runs_ahead=True, block_size=4, pool_tokens=48, max_tokens=12, misleading=True
    ),
}


@pytest.mark.parametrize("setup", AHEAD.values(), ids=AHEAD.keys())
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_one_step_ahead_greedy_equals_transformers(family: str, setup: Setup, checkpoint) -> None:
    completions, steps = run(checkpoint(family), setup)
    assert_greedy(eager(family), completions)
    assert sum(step.num_preempted for step in steps) == 0


@pytest.mark.parametrize("family", CROWDED)
def test_one_step_ahead_in_a_small_pool_greedy_equals_transformers(family: str, checkpoint) -> None:
    completions, steps = run(checkpoint(family), CROWDED[family])
    assert_greedy(eager(family), completions)
    assert sum(step.num_preempted for step in steps) > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_rows_that_attend_together_equal_transformers(
    family: str, checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have 8 samples each, and share prefixes of 177 and 161 tokens."""
    all_shared = []
    monkeypatch.setattr(
        shared_prefix,
        "SharedPrefixes",
        lambda *of: all_shared.append(SharedPrefixes(*of)) or all_shared[-1],
    )
    setup = Setup(n=8, longer=140)
    completions, _ = run(checkpoint(family), setup)
    assert_greedy(eager(family), completions, setup.longer)
    assert max(len(of.order) for of in all_shared) > 40
    assert max(int(of.shared_lens.max()) for of in all_shared) == 192  # the samples of one row


def test_llm_generate_equals_transformers(checkpoint) -> None:
    """Compare with ``generate``; the other tests compare with the logits of transformers."""
    completions, _ = run(checkpoint("llama"), Setup())
    model = eager("llama")
    for row, prompt in enumerate(prompts()):
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=OUTPUT_TOKENS, do_sample=False, pad_token_id=0
        )
        assert tokens_of(completions)[row, 0] == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "other",
    [
        Setup(temperature=1.0, backwards=True),
        Setup(temperature=1.0, block_size=4, pool_tokens=116, preempt_every=2),
        Setup(temperature=1.0, caching=False, max_tokens=16),
        Setup(temperature=1.0, n=4),
        Setup(temperature=1.0, runs_ahead=True),
    ],
    ids=["other_order", "preempted", "uncached_small_chunks", "more_samples", "one_ahead"],
)
def test_sampled_tokens_do_not_depend_on_other_rows(other: Setup, checkpoint) -> None:
    loaded = checkpoint("qwen3")
    alone = tokens_of(run(loaded, Setup(temperature=1.0))[0])
    in_company = tokens_of(run(loaded, other)[0])
    assert {key: in_company[key] for key in alone} == alone


def test_preempted_rows_equal_transformers(checkpoint) -> None:
    """The setup must preempt rows, and other rows must then overwrite their blocks."""
    _, steps = run(checkpoint("llama"), SETUPS["rows_preempted"])
    assert sum(step.recomputed_tokens for step in steps) > 10
