"""Tiny random checkpoints of multimodal models, without the weights of their towers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from batchinfer.worker.model.language_model import language_model, saved_class
from tests.models import VOCAB_SIZE

_TEXT: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "sliding_window": 9,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "head_dim": 4,
}
_GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "aria": {},
    "ernie4_5_vl_moe": {
        "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [24, 16],
    },
    "exaone4_5": {},
    "gemma3": {"layer_types": _LAYER_TYPES},
    "gemma4": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "per_layer_config": {layer: {"head_dim": 16} for layer in (1, 3, 5)},
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gemma4_unified": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {layer: {"head_dim": 16} for layer in (1, 3)},
    },
    "glm4v": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
    "glm4v_moe": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
    "internvl": {},
    "kimi_k25": _MLA,
    "llama4": {
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 32,
        "floor_scale": 20,
        "no_rope_layers": [1, 0, 1],
    },
    "llava": {},
    "mistral3": {},
    "molmo2": {},
    "qwen2_5_vl": {"rope_parameters": _MROPE},
    "qwen2_vl": {"rope_parameters": _MROPE},
    "qwen3_5": {**_GATED_DELTA, "rope_parameters": _MROPE},
    "qwen3_5_moe": {
        **_GATED_DELTA,
        "rope_parameters": _MROPE,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_vl": {"rope_parameters": _MROPE},
    "qwen3_vl_moe": {"rope_parameters": _MROPE},
    "step3p7": {
        "num_sliding_attention_heads": 8,
        "layer_types": _LAYER_TYPES,
        "share_expert_dim": 24,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in set(_LAYER_TYPES)
        },
    },
    "voxtral": {},
}

FAMILIES = tuple(_FAMILIES)


def tiny_wrapper_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return a config with a tiny language model; its towers have the family's default sizes."""
    text_class = type(CONFIG_MAPPING[family]().get_text_config())
    own = text_class().to_dict()
    values = {key: value for key, value in _TEXT.items() if key in own}
    text = text_class(**values | dict(_FAMILIES[family]) | changes)
    config = CONFIG_MAPPING[family](text_config=text.to_dict())
    wrapper_class = saved_class(config)
    config.architectures = [wrapper_class.__name__]
    return config


def make_wrapper(family: str, path: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Write a checkpoint with the tensor names of published ones.

    Returns:
        transformers' model with eager attention; its towers have no weights.
    """
    config = tiny_wrapper_config(family, **changes)
    wrapper_class: Any = saved_class(config)
    if not hasattr(config, "pad_token_id"):
        config.pad_token_id = None
    with torch.device("meta"):
        model = wrapper_class._from_config(config, attn_implementation="eager")
    torch.manual_seed(seed)
    before = language_model(model)
    body = type(before)._from_config(model.config.get_text_config())
    head = torch.nn.Linear(body.config.hidden_size, VOCAB_SIZE, bias=False)
    for parameter in (*body.parameters(), *head.parameters()):
        mean, std = (0.0, 0.3) if parameter.dim() > 1 else (1.0, 0.1)
        torch.nn.init.normal_(parameter, mean, std)
    model.set_submodule(next(name for name, at in model.named_modules() if at is before), body)
    model.set_output_embeddings(head)
    tensors = model.state_dict()
    saved = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    model.save_pretrained(path, state_dict=saved)
    return model.eval()
