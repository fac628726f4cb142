from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig, NemotronHConfig

from batchinfer.engine.simulate.expert_layers import num_expert_layers
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.engine.simulate.roofline import DEVICES, StepWork, TowerCost, step_seconds
from batchinfer.engine.step_io.build_step import build_step
from tests.engine.fake import make_engine, make_request
from tests.models import tiny_config

H200 = DEVICES["h200"]
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def qwen3_8b() -> ModelCost:
    return ModelCost.from_config(QWEN3_8B, "bfloat16")


def test_a_known_model_has_its_known_size() -> None:
    model = qwen3_8b()
    assert model.weight_bytes == pytest.approx(16.4e9, rel=0.01)
    assert model.kv_bytes == 144 * 2**10


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gpt2", "starcoder2", "qwen3_moe", "minicpm3"]
)
def test_weights_equal_those_that_transformers_makes_from_the_config(family: str) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 1024}
    if family == "gpt2":
        sizes |= {"n_embd": 64}
    config = tiny_config(family, **(sizes | {"hidden_size": 64, "intermediate_size": 256}))
    model = AutoModelForCausalLM.from_config(config)
    actual = 4 * sum(parameter.numel() for parameter in model.parameters())
    planned = ModelCost.from_config(config.to_dict(), "float32").weight_bytes
    # ModelCost leaves out learned positions, which are half as large as this gpt2's embedding.
    assert planned == pytest.approx(actual, rel=0.15 if family == "gpt2" else 0.03)


@pytest.mark.parametrize("family", ["gemma4_text", "mimo_v2_flash"])
def test_layers_of_differing_heads_are_counted_one_by_one(family: str) -> None:
    config = tiny_config(family)
    cost = ModelCost.from_config(config.to_dict(), "float32")
    projections = [
        parameter.numel()
        for name, parameter in AutoModelForCausalLM.from_config(config).named_parameters()
        if ".self_attn." in name and name.endswith("_proj.weight")
    ]
    assert cost.layers * cost.attention_parameters == sum(projections)


def test_latents_need_less_reading_and_more_computing() -> None:
    config = tiny_config("deepseek_v3").to_dict()
    expanded = ModelCost.from_config(config, "float32")
    latent = ModelCost.from_config(config, "float32", latent=True)
    assert (expanded.kv_bytes, latent.kv_bytes) == (3 * 4 * (12 + 8) * 4, 3 * (16 + 4) * 4)
    assert (expanded.attention_width, latent.attention_width) == (12 + 8, 20 + 16)
    assert latent.weight_bytes == expanded.weight_bytes


def test_small_steps_read_the_weights_and_large_ones_compute() -> None:
    model = qwen3_8b()
    matrices = model.weight_bytes - model.head_parameters * 2  # without the embedding
    one = step_seconds(model, H200, StepWork(1, 1, decode_context=1))
    assert one == pytest.approx(matrices / H200.bandwidth, rel=0.01)
    chunk = StepWork(tokens=8192, logits_rows=0, decode_context=0)
    flops = 2 * model.active_parameters * 8192
    passes = 8192 * model.layers * model.activations * 2 / H200.bandwidth
    assert step_seconds(model, H200, chunk) == pytest.approx(flops / 790e12 + passes, rel=0.02)


def test_decodes_read_their_context() -> None:
    model = qwen3_8b()
    short, long = (
        step_seconds(model, H200, StepWork(256, 256, decode_context=256 * context))
        for context in (1, 2049)
    )
    assert long - short == pytest.approx(256 * 2048 * model.kv_bytes / H200.bandwidth, rel=1e-6)


SPARSE = QWEN3_8B | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def test_few_tokens_read_few_experts() -> None:
    model = ModelCost.from_config(SPARSE, "bfloat16")
    without = replace(model, experts=0, experts_per_token=0).weights_read(1)
    expert = model.layers * model.expert_parameters * 2
    assert model.weights_read(1) == pytest.approx(without + 8 * expert)
    assert model.weights_read(10_000) == pytest.approx(without + 128 * expert)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 2}),
        ("lfm2_moe", {"num_dense_layers": 1}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ],
)
def test_dense_layers_of_models_with_experts_are_counted_as_such(
    family: str, more: dict[str, Any]
) -> None:
    config = tiny_config(family, **more, num_hidden_layers=4)
    cost = ModelCost.from_config(config.to_dict(), "float32")
    names = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    mlps = {name: tensor for name, tensor in names.items() if "mlp" in name or "feed_f" in name}
    actual = sum(
        tensor.numel()
        for name, tensor in mlps.items()
        if not name.endswith(("gate.weight", "router.weight", "bias"))
    )
    routed = cost.experts * cost.expert_parameters + cost.shared_parameters
    assert 0 < cost.dense_layers < 4
    assert cost.expert_layers * routed + cost.dense_layers * cost.mlp_parameters == actual


NEMOTRON_3_NANO = NemotronHConfig(
    layers_block_type=["linear_attention", "moe"] * 23 + ["full_attention"] * 6,
    hidden_size=2688,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    n_routed_experts=128,
    num_experts_per_tok=6,
    moe_intermediate_size=1856,
    moe_shared_expert_intermediate_size=3712,
    mamba_num_heads=64,
    mamba_head_dim=64,
    ssm_state_size=128,
)
GEMMA_4_26B = Gemma4TextConfig(
    vocab_size=262_144,
    hidden_size=2816,
    intermediate_size=2112,
    num_hidden_layers=30,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
    enable_moe_block=True,
    num_experts=128,
    top_k_experts=8,
    moe_intermediate_size=704,
)


@pytest.mark.parametrize(
    ("config", "per_token"), [(NEMOTRON_3_NANO, 6), (GEMMA_4_26B, 8)], ids=["nemotron", "gemma"]
)
def test_weights_of_large_models_with_experts(config: Any, per_token: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    cost = ModelCost.from_config(config.to_dict(), "bfloat16")
    actual = sum(2 * parameter.numel() for parameter in model.parameters())
    assert cost.weight_bytes == pytest.approx(actual, rel=0.01)
    assert cost.experts_per_token == per_token


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, 2),
        ({"moe_layers": [1]}, 1),
        ({"interleave_moe_layer_step": 3}, 1),
        ({"moe_layer_freq": [0, 1, 0]}, 1),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, 1),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, 1),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, 2),
        ({}, 3),
    ],
)
def test_keys_that_say_which_layers_have_experts(more: dict[str, Any], expected: int) -> None:
    assert num_expert_layers(more, 3) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shared_expert_intermediate_size", 1536),
        ("shared_intermediate_size", 1536),
        ("n_shared_experts", 2),
        ("moe_num_shared_experts", 2),
    ],
)
def test_each_token_uses_the_shared_experts(key: str, value: int) -> None:
    model, without = (
        ModelCost.from_config(SPARSE | more, "bfloat16") for more in ({key: value}, {})
    )
    shared = model.layers * 3 * model.hidden * 1536
    assert model.active_parameters == without.active_parameters + shared
    assert model.weights_read(1) == pytest.approx(without.weights_read(1) + 2 * shared)
    assert model.weight_bytes == without.weight_bytes + 2 * shared


def test_the_work_of_a_step_is_counted_from_its_arrays() -> None:
    engine, _ = make_engine(64)
    engine.add_request(make_request(0, [1, 2, 3, 4, 5], max_tokens=4))
    engine.step()
    engine.add_request(make_request(1, [7, 8, 9], max_tokens=4))
    table = engine.scheduler.table
    schedule = engine.scheduler.schedule()
    assert schedule is not None
    work = StepWork.of(build_step(table, schedule).step)
    # Row 0 computes its sixth token. Row 1 computes 3 prompt tokens, which see 1, 2 and 3 tokens.
    assert work == StepWork(
        tokens=4,
        logits_rows=2,
        decode_context=6,
        chunks=1,
        chunk_context=3,
        chunk_pairs=6,
        sequences=2,
    )
    assert np.isfinite(step_seconds(qwen3_8b(), H200, work))


def test_attention_of_a_tower_grows_with_the_square_of_an_image_up_to_a_tile() -> None:
    tower = TowerCost(parameters=10, flops=1e3, attention_width=3)
    assert tower.seconds({5: 2}) == (2 * 10 * 10 + 4 * 3 * (5 * 5 * 2)) / 1e3
    tiled = replace(tower, most_context=4)
    assert tiled.seconds({3: 1, 8: 1}) == (2 * 10 * 11 + 4 * 3 * (3 * 3 + 8 * 4)) / 1e3
