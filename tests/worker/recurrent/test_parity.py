"""Models with recurrent layers choose the same tokens as transformers, however rows are run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer.config import ModelConfig
from batchinfer.worker.fusion.gated_delta_net import FusedGatedDeltaNet
from batchinfer.worker.fusion.native_layers import layers_of
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.recurrent.gated_delta_net import FAMILIES
from batchinfer.worker.self_test import Probe
from tests.lora import make_adapter
from tests.models import RECURRENT_FAMILIES, make_checkpoint, tiny_model
from tests.parity import CPU, Setup, assert_greedy, prompts, run, tokens_of

SETUPS = {
    "plain": Setup(),
    "block_size_4": Setup(block_size=4),
    "chunks_of_7": Setup(max_tokens=7),
    "four_samples": Setup(n=4),
    "no_prefix_caching": Setup(caching=False),
    "rows_preempted": Setup(
        block_size=4, pool_tokens=100, num_states=4, preempt_every=3, misleading=True
    ),
    "rows_swapped": Setup(
        block_size=4,
        pool_tokens=100,
        num_states=4,
        preempt_every=3,
        misleading=True,
        num_host_blocks=2000,
    ),
}


ONE_OF_EACH_KIND = ("falcon_mamba", "kimi_linear", "lfm2", "mamba2", "nemotron_h", "qwen3_5_text")
"""A family of each kind of recurrent layer. Tests of the other families have the marker ``long``,
and run only some setups: states that end a chunk, are copied, and are swapped."""
SETUPS_OF_OTHERS = ("chunks_of_7", "four_samples", "rows_swapped")
EVERY_FAMILY = [
    pytest.param(family, marks=[] if family in ONE_OF_EACH_KIND else pytest.mark.long)
    for family in RECURRENT_FAMILIES
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that loads a family's tiny checkpoint, each only once."""

    @functools.cache
    def load(family: str) -> LoadedModel:
        folder: Path = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return load_model(ModelConfig(str(folder)), device=CPU)

    return load


@functools.cache
def eager(family: str) -> torch.nn.Module:
    """Return transformers' model with the same weights."""
    return tiny_model(family)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[] if family in ONE_OF_EACH_KIND else pytest.mark.long)
        for family in RECURRENT_FAMILIES
        for name in (SETUPS if family in ONE_OF_EACH_KIND else SETUPS_OF_OTHERS)
    ],
)
def test_greedy_tokens_equal_transformers(family: str, name: str, checkpoint) -> None:
    setup = SETUPS[name]
    completions, steps = run(checkpoint(family), setup)
    assert_greedy(eager(family), completions)
    windows = checkpoint(family).layout(4).windows
    if setup.num_host_blocks and not any(windows):  # models with windows are not swapped
        assert sum(step.recomputed_tokens for step in steps) == 0
        # Without attention, all states stay in the pool.
        assert (sum(step.swapped_in_blocks for step in steps) > 0) == (windows == (0,))
    if setup.caching and setup.n == 1 and setup.num_states > 4:
        distinct = sum(map(len, prompts())) - 2 * 37 - 2 * 21
        assert sum(step.prefill_tokens for step in steps) <= distinct + 9


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bamba", {"attn_layer_indices": []}),
        ("granitemoehybrid", {"layer_types": ["linear_attention"] * 4}),
        ("kimi_linear", {"layer_types": ["linear_attention"] * 4}),
        ("lfm2", {"layer_types": ["conv"] * 4}),
        ("nemotron_h", {"layers_block_type": ["mlp", "linear_attention"] * 2}),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}),
    ],
)
def test_hybrid_families_without_a_layer_that_attends(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    loaded = load_model(ModelConfig(str(make_checkpoint(family, tmp_path, **changes))), device=CPU)
    assert loaded.layout(16).windows == ()
    completions, steps = run(loaded, Setup(num_states=4, max_tokens=7))
    assert_greedy(tiny_model(family, **changes), completions)
    assert max(step.kv_blocks_used for step in steps) == 4 * loaded.layout(16).slots_per_state
    assert {step.kv_waste for step in steps} == {0.0}


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_samples_do_not_depend_on_schedule(family: str, checkpoint) -> None:
    plain, _ = run(checkpoint(family), Setup(n=4, temperature=1.0))
    names = ["chunks_of_7", "rows_swapped"]
    if family in ONE_OF_EACH_KIND:
        names += ["rows_preempted", "no_prefix_caching"]
    for name in names:
        setup = SETUPS[name]
        changed = Setup(**{**vars(setup), "n": 4, "temperature": 1.0, "backwards": True})
        completions, _ = run(checkpoint(family), changed)
        assert tokens_of(completions) == tokens_of(plain), name


@pytest.mark.parametrize("family", ["kimi_linear", "olmo_hybrid", "qwen3_5_text", "qwen3_next"])
def test_adapters_apply_to_projections_of_recurrent_layers(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / "model")
    layers = r"self_attn\.(forget_gate\.)?" if family == "kimi_linear" else r"linear_attn\."
    targets = rf".*layers\.0\.{layers}\w*proj\w*"
    peft = make_adapter(tiny_model(family), tmp_path / "a", seed=1, r=4, target_modules=targets)
    choice = ModelConfig(str(folder), adapters={"a": str(tmp_path / "a")})
    loaded = load_model(choice, device=CPU)
    token_ids = prompts()[0]
    probe = Probe(loaded.model, loaded.layout(16), token_ids, adapters=[1])
    with torch.inference_mode():
        expected = peft(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(probe.logits(), expected, rtol=1e-3, atol=1e-3)


def test_projections_of_recurrent_layers_are_merged(checkpoint) -> None:
    layers = layers_of(checkpoint("qwen3_5_text").model.model.layers)
    mixers = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
    assert [type(mixer) for mixer in mixers] == [FusedGatedDeltaNet] * 3


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bamba", {"attn_layer_indices": [9]}),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 9 + ["full_attention"]}),
    ],
)
def test_first_layer_that_attends_may_come_late(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path, num_hidden_layers=10, **changes)
    assert load_model(ModelConfig(str(folder)), device=CPU)


def test_five_multipliers_are_not_cut_with_five_layers(tmp_path: Path) -> None:
    folder = make_checkpoint("falcon_h1", tmp_path, num_hidden_layers=5)
    assert load_model(ModelConfig(str(folder)), device=CPU)


def test_inputs_are_contiguous_with_one_value_head_per_key_head() -> None:
    model = tiny_model("qwen3_next", linear_num_value_heads=2)
    layer = model.model.layers[0].linear_attn
    inputs = FAMILIES[type(layer).__name__].inputs(layer, torch.ones(5, model.config.hidden_size))
    assert [part.stride(1) for part in inputs] == [1, 1, 1, 1]
