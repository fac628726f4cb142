"""Tiny models of transformers' decoder-only families, with random weights and options."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

NUM_POSITIONS = 256

FAMILIES = (
    *("afmoe", "apertus", "arcee", "aria_text", "biogpt", "bitnet", "cohere", "cohere2"),
    *("cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "doge", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa"),
    *("granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3"),
    *("hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1", "llama", "longcat_flash"),
    *("mellum", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral"),
    *("moshi", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon"),
    *("phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    *("solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu", "diffllama", "axk1"),
)

_SIZES: Mapping[str, Any] = {
    "vocab_size": 199,
    "n_embd": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "n_inner": 48,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": NUM_POSITIONS,
    "n_positions": NUM_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "layer_types": None,
    "mlp_layer_types": None,
}
"""Sizes that a drawn config gets if its family has the key."""
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "logit_cap")
_BIASES = (
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "use_bias",
    "bias",
    "use_qk_norm",
    "qk_layernorm",
)
_SCALES = ("logit_scale", "attention_multiplier", "residual_multiplier", "logits_scaling")


def draw_config(family: str, random: Random) -> PreTrainedConfig:
    """Draw a config of a family with small odd sizes and, if possible, windows, caps and biases.

    Raises:
        Exception: the family refuses the config.
    """
    own = CONFIG_MAPPING[family]().to_dict()
    drawn = {**_SIZES, **_drawn_sizes(own, random), **_drawn_flags(own, random)}
    return CONFIG_MAPPING[family](**{key: value for key, value in drawn.items() if key in own})


def _drawn_sizes(own: Mapping[str, Any], random: Random) -> dict[str, Any]:
    kv_heads, group = random.choice([1, 2, 3]), random.choice([1, 2, 3])
    latent = "qk_rope_head_dim" in own
    width = random.choice([4, 6, 8, 10, 16, 24])
    hidden = kv_heads * group * width if "head_dim" not in own else random.choice([24, 32, 40, 52])
    layers = random.choice([1, 2, 3, 4, 5])
    return {
        **dict.fromkeys(("num_attention_heads", "n_head"), kv_heads * group),
        "num_key_value_heads": kv_heads * group if latent else kv_heads,
        "head_dim": 4 if latent else width,
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), hidden),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), layers),
        "initializer_range": 1.7 / hidden**0.5,
        "intermediate_size": random.choice([16, 33, 48, 80]),
        "moe_intermediate_size": random.choice([8, 16, 20, 24]),
    }


def _drawn_flags(own: Mapping[str, Any], random: Random) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sliding_window": random.choice([None, 3, 7, 16, 33, NUM_POSITIONS]),
        "use_sliding_window": random.random() < 0.5,
        "max_window_layers": random.choice([0, 1, 2, 5]),
        "tie_word_embeddings": random.random() < 0.3,
        "rms_norm_eps": random.choice([1e-6, 1e-2]),
        "partial_rotary_factor": random.choice([0.5, 1.0]),
        "norm_topk_prob": random.random() < 0.5,
        "multi_query": random.random() < 0.5,
        "use_parallel_residual": random.random() < 0.5,
        "scale_attn_by_inverse_layer_idx": random.random() < 0.5,
        "rope_parameters": random.choice(
            [
                {"rope_type": "default", "rope_theta": 10_000.0},
                {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
                {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
            ]
        ),
    }
    found |= {key: random.choice([None, 1.5, 20.0]) for key in _CAPS}
    found |= {key: random.random() < 0.5 for key in _BIASES}
    found |= {key: random.choice([0.5, 1.0, 2.0]) for key in _SCALES}
    if "layer_types" in own and random.random() < 0.4:
        kinds = ["sliding_attention", "full_attention"]
        found["layer_types"] = [random.choice(kinds) for _ in range(9)]
    return {key: value for key, value in found.items() if random.random() < 0.6}
