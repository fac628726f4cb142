"""Kimi Linear: its published config, and latent attention next to recurrent layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from batchinfer.config import ModelConfig
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.kv.model_config import max_positions
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.worker.fusion.gated_delta_net import FusedGatedDeltaNet
from batchinfer.worker.loader import load_model
from batchinfer.worker.model.config import load_config
from tests.models import make_checkpoint, tiny_model
from tests.parity import CPU, Setup, assert_greedy, run, tokens_of

ATTENDING = [4, 8, 12, 16, 20, 24, 27]  # numbered from 1
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": ATTENDING,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer not in ATTENDING],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""Keys of the published config of Kimi-Linear-48B-A3B."""


def test_published_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = load_config(tmp_path).to_dict()
    assert max_positions(config) == 1048576
    layout = KVLayout.from_config(config, block_size=16, dtype="bfloat16", latent=True)
    assert layout.attention_layers == [layer - 1 for layer in ATTENDING]
    assert layout.bytes_per_token == 7 * (512 + 64) * 2
    assert layout.state is not None
    assert layout.state.num_bytes == 20 * 4 * 32 * (128 * 128 + 3 * 3 * 128)
    cost = ModelCost.from_config(config, "bfloat16")
    assert cost.expert_layers == 26, "the first layer is dense"
    assert cost.weight_bytes == pytest.approx(2 * 48e9, rel=0.03)


def test_latents_and_recurrent_states_share_the_pool(tmp_path: Path) -> None:
    folder = make_checkpoint("kimi_linear", tmp_path)
    names = load_file(folder / "model.safetensors")
    assert "model.layers.0.self_attn.q_conv1d.weight" in names  # as named in published checkpoints
    outputs = []
    for latent in (True, False):
        loaded = load_model(ModelConfig(str(folder)), device=CPU, latent=latent)
        layers = loaded.model.model.layers
        mixers = [type(layer.self_attn) for layer in layers]
        assert mixers.count(FusedGatedDeltaNet) == 3
        setup = Setup(block_size=4, pool_tokens=100, num_states=4, preempt_every=3)
        completions, _ = run(loaded, setup)
        assert_greedy(tiny_model("kimi_linear"), completions)
        outputs.append(tokens_of(completions))
    assert outputs[0] == outputs[1]
