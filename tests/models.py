"""Tiny random checkpoints of many families, so that tests need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 199

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_LATENT_MOE: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 8,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 9},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 9,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {"head_dim": 8, "sliding_window": 9, "layer_types": _LAYER_TYPES},
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 9,
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_moe": {"head_dim": 8, **_MOE},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"num_key_value_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gpt_neox": {"num_key_value_heads": 4},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "cohere2": {"sliding_window": 9, "logit_scale": 0.5, "layer_types": _LAYER_TYPES},
    "olmo2": {},
    "starcoder2": {"sliding_window": 9},
    "gemma4_text": {
        **_SHARED_KV,
        "per_layer_config": {layer: {"head_dim": 16} for layer in (1, 3, 5)},
    },
    "gemma3n_text": {
        **_SHARED_KV,
        "intermediate_size": [48] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "laurel_rank": 4,
    },
    "mimo_v2_flash": {
        "head_dim": 12,
        "v_head_dim": 8,
        "num_key_value_heads": 1,
        "sliding_window": 9,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "layer_types": _LAYER_TYPES,
    },
    "llama4_text": {
        "head_dim": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 32,
        "floor_scale": 20,
        "no_rope_layers": [1, 0, 1],
    },
    "deepseek_v3": {**_LATENT, **_LATENT_MOE},
}
_GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_MAMBA1: dict[str, Any] = {"state_size": 8, "time_step_rank": 4}
_MAMBA2_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_SHORT_CONV_LAYERS = ["conv", "conv", "full_attention", "conv"]
_RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA2, "attn_layer_indices": [2]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64, "mamba_rms_norm": True, "ssm_in_multiplier": 0.7},
    "falcon_mamba": _MAMBA1,
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": _MAMBA2_LAYERS,
        "shared_intermediate_size": 48,
        "num_local_experts": 4,
        "embedding_multiplier": 2.0,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": {
        **_LATENT,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 24,
        "layer_types": _GATED_DELTA["layer_types"],
        "linear_num_heads": 2,
        "linear_head_dim": 16,
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": _SHORT_CONV_LAYERS,
        "block_multiple_of": 8,
        "conv_bias": True,
    },
    "lfm2_moe": {**_MOE, "num_hidden_layers": 4, "layer_types": _SHORT_CONV_LAYERS},
    "lfm3": {
        "num_hidden_layers": 5,
        "head_dim": 8,
        "layer_types": [
            *("conv", "sliding_attention", "full_attention", "conv", "sliding_attention")
        ],
        "sliding_window": 9,
    },
    "mamba": _MAMBA1,
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 8,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "num_hidden_layers": 4,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
    },
    "olmo_hybrid": {**_GATED_DELTA, "linear_num_value_heads": 2},
    "qwen3_5_moe_text": {**_GATED_DELTA, **_MOE, "shared_expert_intermediate_size": 24},
    # With larger weights, the model would be badly conditioned.
    "qwen3_5_text": {**_GATED_DELTA, "initializer_range": 0.2},
    "qwen3_next": {**_GATED_DELTA, **_MOE, "shared_expert_intermediate_size": 24},
    "zamba2": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "mamba_headdim": 16,
    },
}
_LATENT_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _FAMILIES["deepseek_v3"],
    "deepseek_v2": {**_LATENT, **_LATENT_MOE, "q_lora_rank": None},
    "glm4_moe_lite": {**_LATENT, **_LATENT_MOE, "v_head_dim": 12},
    "minicpm3": {**_LATENT, "v_head_dim": 6},
    "youtu": _LATENT,
    "axk1": {**_LATENT, **_LATENT_MOE},
}
_DECODER_FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {
        "num_key_value_heads": 4,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "init_std": 0.3,
        "pad_token_id": 1,
    }
}
_INTERLEAVED_FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5},
    "ernie4_5": {},
    "glm4": {"head_dim": 8, "eos_token_id": VOCAB_SIZE - 1},
    "helium": {"head_dim": 8},
}
DECODER_FAMILIES = tuple(_DECODER_FAMILIES)
"""Families whose output head reads the output of a ``decoder`` module inside the model."""
INTERLEAVED_FAMILIES = tuple(_INTERLEAVED_FAMILIES)
"""Families whose rotary embeddings rotate adjacent elements of a head."""
LATENT_FAMILIES = tuple(_LATENT_FAMILIES)
"""Families with latent attention."""

RECURRENT_FAMILIES = tuple(_RECURRENT_FAMILIES)
"""Families with recurrent layers."""

FAMILIES = tuple(_FAMILIES)
"""Other families for which ``tiny_model`` can make a checkpoint."""


_ALL_FAMILIES = (
    _FAMILIES | _INTERLEAVED_FAMILIES | _LATENT_FAMILIES | _DECODER_FAMILIES | _RECURRENT_FAMILIES
)


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return a config of 3 small layers with grouped heads and no end-of-sequence token."""
    values = _COMMON | _ALL_FAMILIES[family] | changes
    if family == "gpt2":
        unused = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        unused += ("num_key_value_heads", "max_position_embeddings")
        values = {key: value for key, value in values.items() if key not in unused}
    return CONFIG_MAPPING[family](**values)


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Return transformers' float32 model of ``tiny_config``, with eager attention."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        tiny_config(family, **changes), attn_implementation="eager", dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    return model.eval()


def make_checkpoint(family: str, path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny random float32 checkpoint (weights and config, no tokenizer) to ``path``."""
    model = tiny_model(family, seed=seed, **changes)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(path)
    return path


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_text_model(path: Path, family: str = "llama", **changes: Any) -> Path:
    """Write a tiny random model with byte tokenizer and chat template; EOS is ``<|im_end|>``."""
    specials = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({text: at for at, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    ids = {"vocab_size": len(alphabet), "bos_token_id": 0, "eos_token_id": 2}
    make_checkpoint(family, path, **ids, **changes)
    tokenizer.save_pretrained(path)
    return path
