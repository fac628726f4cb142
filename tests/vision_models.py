"""Tiny random vision-language models, and images for them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from batchinfer.engine.images import Image
from tests.models import VOCAB_SIZE

IMAGE_TOKEN = VOCAB_SIZE - 1
_TEXT = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "initializer_range": 0.2,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "vision_config": {**_VISION, "model_type": "clip_vision_model", "image_size": 32},
        "text_config": _TEXT,
        "image_token_id": IMAGE_TOKEN,
        "image_token_index": IMAGE_TOKEN,
    },
    "mistral3": {
        "vision_config": {**_VISION, "model_type": "pixtral", "image_size": 64, "head_dim": 16},
        "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
        "image_token_id": IMAGE_TOKEN,
        "image_token_index": IMAGE_TOKEN,
        "spatial_merge_size": 2,
    },
    "internvl": {
        "vision_config": {
            **_VISION,
            "model_type": "internvl_vision",
            "image_size": [32, 32],
            "patch_size": [8, 8],
        },
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "image_token_id": IMAGE_TOKEN,
        "downsample_ratio": 0.5,
    },
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.2,
}
_QWEN_TEXT = {
    **_TEXT,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
    },
}
_CONFIGS["qwen2_5_vl"] = {
    "vision_config": {
        **_QWEN_VISION,
        "window_size": 32,
        "fullatt_block_indexes": [1],
        "model_type": "qwen2_5_vl_vision",
    },
    "text_config": {**_QWEN_TEXT, "model_type": "qwen2_5_vl_text"},
    "image_token_id": IMAGE_TOKEN,
}
_CONFIGS["qwen3_vl"] = {
    "vision_config": {
        **_QWEN_VISION,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
        "model_type": "qwen3_vl_vision",
    },
    "text_config": {**_QWEN_TEXT, "model_type": "qwen3_vl_text"},
    "image_token_id": IMAGE_TOKEN,
}
_CONFIGS["qwen3_5"] = {
    "vision_config": {
        **_QWEN_VISION,
        "num_position_embeddings": 16,
        "model_type": "qwen3_5_vision",
    },
    "text_config": {
        **_QWEN_TEXT,
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            **_QWEN_TEXT["rope_parameters"],
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
    "image_token_id": IMAGE_TOKEN,
}
_CONFIGS["gemma3"] = {
    "vision_config": {**_VISION, "model_type": "siglip_vision_model", "image_size": 32},
    "text_config": {
        **_TEXT,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 3,  # fewer tokens than an image has
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mm_tokens_per_image": 4,
    "image_token_index": IMAGE_TOKEN,
}
_GEMMA4_VISION = {
    **_VISION,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 256,
    "model_type": "gemma4_vision",
}
_GEMMA4_TEXT = {
    **_TEXT,
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 3,  # less than an image
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 1,
}
_CONFIGS["gemma4"] = {  # like 26B-A4B
    "vision_config": {**_GEMMA4_VISION, "standardize": True},
    "text_config": {
        **_GEMMA4_TEXT,
        "use_bidirectional_attention": "vision",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
    },
    "image_token_id": IMAGE_TOKEN,
    "initializer_range": 0.2,
}
_SAM = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "window_size": 3,
    "global_attn_indexes": [1],
    "mlp_dim": 48,
    "downsample_channels": [24, 32],
    "initializer_range": 0.2,
}
_OCR_TEXT = {
    **_TEXT,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_CONFIGS["unlimited_ocr"] = {
    "vision_config": {
        "model_type": "unlimited_ocr_vision",
        "sam_config": {**_SAM, "image_size": 64},
        "encoder_config": {**_VISION, "image_size": 32},
    },
    "text_config": {
        **_OCR_TEXT,
        "model_type": "unlimited_ocr_text",
        "num_key_value_heads": 4,  # eager attention of transformers needs as many as heads
        "sliding_window": 5,
    },
    "image_token_id": IMAGE_TOKEN,
}
VISION_FAMILIES = tuple(_CONFIGS)
_CONFIGS["qwen2_vl"] = {
    "vision_config": {
        **{name: _QWEN_VISION[name] for name in ("depth", "num_heads", "patch_size")},
        "embed_dim": 32,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "initializer_range": 0.2,
        "model_type": "qwen2_vl_vision",
    },
    "text_config": {**_QWEN_TEXT, "model_type": "qwen2_vl_text"},
    "image_token_id": IMAGE_TOKEN,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
_CONFIGS["qwen3_vl_moe"] = {
    "vision_config": {**_CONFIGS["qwen3_vl"]["vision_config"], "model_type": "qwen3_vl_moe_vision"},
    "text_config": {**_QWEN_TEXT, **_EXPERTS, "model_type": "qwen3_vl_moe_text"},
    "image_token_id": IMAGE_TOKEN,
}
_CONFIGS["qwen3_5_moe"] = {
    "vision_config": {**_CONFIGS["qwen3_5"]["vision_config"], "model_type": "qwen3_5_moe_vision"},
    "text_config": {
        **_CONFIGS["qwen3_5"]["text_config"],
        **_EXPERTS,
        "model_type": "qwen3_5_moe_text",
    },
    "image_token_id": IMAGE_TOKEN,
}
for _family in ("glm4v", "glm_ocr"):
    _CONFIGS[_family] = {
        "vision_config": {**_QWEN_VISION, "image_size": 64, "model_type": f"{_family}_vision"},
        "text_config": {**_QWEN_TEXT, "model_type": f"{_family}_text"},
        "image_token_id": IMAGE_TOKEN,
    }
_CONFIGS["glm4v_moe"] = {
    "vision_config": {**_CONFIGS["glm4v"]["vision_config"], "model_type": "glm4v_moe_vision"},
    "text_config": {
        **_QWEN_TEXT,
        "model_type": "glm4v_moe_text",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "rope_parameters": {
            **_QWEN_TEXT["rope_parameters"],
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
    "image_token_id": IMAGE_TOKEN,
}
_CONFIGS["gemma4_e4b"] = {
    "model_type": "gemma4",
    "vision_config": {**_GEMMA4_VISION, "use_clipped_linears": True},
    "audio_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [8, 4],
        "output_proj_dims": 16,
        "model_type": "gemma4_audio",
    },
    "text_config": {
        **_GEMMA4_TEXT,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 512,
    },
    "image_token_id": IMAGE_TOKEN,
    "initializer_range": 0.2,
}
_CONFIGS["gemma4_unified"] = {
    "vision_config": {
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "mm_embed_dim": 32,
        "mm_posemb_size": 128,
        "output_proj_dims": 32,
        "initializer_range": 0.2,
        "model_type": "gemma4_unified_vision",
    },
    "text_config": {
        **{key: _GEMMA4_TEXT[key] for key in _GEMMA4_TEXT if key != "hidden_size_per_layer_input"},
        "model_type": "gemma4_unified_text",
        "sliding_window": 80,  # more than an image, because transformers ignores it within images
    },
    "image_token_id": IMAGE_TOKEN,
    "initializer_range": 0.2,
}
_CONFIGS["paddleocr_vl"] = {
    "vision_config": {**_VISION, "model_type": "paddleocr_vl_vision", "image_size": 32},
    "text_config": {**_QWEN_TEXT, "model_type": "paddleocr_vl_text"},
    "image_token_id": IMAGE_TOKEN,
    "tie_word_embeddings": False,
}
_CONFIGS["deepseek_ocr2"] = {  # an image has at least 145 tokens
    "vision_config": {
        "model_type": "deepseek_ocr2_vision",
        "sam_config": {**_SAM, "image_size": 80},
        "encoder_config": {**_VISION, "num_key_value_heads": 2, "vocab_size": 8},
    },
    "text_config": {
        **_OCR_TEXT,
        "model_type": "deepseek_ocr2_text",
        "max_position_embeddings": 8192,
    },
    "image_token_id": IMAGE_TOKEN,
}
_CONFIGS["lfm2_vl"] = {
    "vision_config": {**_VISION, "model_type": "siglip2_vision_model", "num_patches": 16},
    "text_config": {
        **_TEXT,
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 8,
    },
    "projector_hidden_size": 48,
    "image_token_id": IMAGE_TOKEN,
    "tie_word_embeddings": False,
}
RELATED_FAMILIES = tuple(family for family in _CONFIGS if family not in VISION_FAMILIES)
"""Families that differ little from a family in ``VISION_FAMILIES``."""
GRID_FAMILIES = tuple(
    family
    for family, config in _CONFIGS.items()
    if "mrope_section" in config["text_config"].get("rope_parameters", {})
)
PATCH_FAMILIES = tuple(family for family in _CONFIGS if family.startswith("gemma4"))
"""Families whose images are rows of patches with positions."""


def answer_logits(
    model: Any, token_ids: torch.Tensor, num_prompt: int, features: Mapping[str, Any]
) -> torch.Tensor:
    """Return transformers' logits [T, vocabulary] of a prompt with images and its answer, [1, T].

    Unlimited-OCR knows which tokens belong to the prompt only if they are computed first.
    """
    if model.config.model_type != "unlimited_ocr":
        logits: torch.Tensor = model(input_ids=token_ids, use_cache=False, **features).logits[0]
        return logits
    prompt, answer = token_ids[:, :num_prompt], token_ids[:, num_prompt:]
    first = model(input_ids=prompt, use_cache=True, **features)
    if not answer.shape[1]:
        return first.logits[0]
    second = model(input_ids=answer, use_cache=True, cache=first.cache)
    return torch.cat([first.logits[0], second.logits[0]])


def make_vision_checkpoint(
    family: str,
    path: Path,
    seed: int = 0,
    *,
    image_token: int = IMAGE_TOKEN,
    vocab_size: int = VOCAB_SIZE,
) -> Path:
    """Write a tiny random float32 checkpoint of a vision-language model."""
    torch.manual_seed(seed)
    values = copy.deepcopy(_CONFIGS[family])
    for name in values.keys() & {"image_token_id", "image_token_index"}:
        values[name] = image_token
    values["text_config"]["vocab_size"] = vocab_size
    config = AutoConfig.for_model(values.pop("model_type", family), **values)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    if family == "gemma3":  # all images would look alike: its projection starts at 0
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    for name, parameter in model.named_parameters():
        # Gemma 4 starts with equal embeddings of all positions, and zeros for the padding token.
        if "position_embedding_table" in name or "embed_tokens_per_layer" in name:
            torch.nn.init.normal_(parameter)
        if "sam_encoder" in name and ("rel_pos" in name or "pos_embed" in name):
            torch.nn.init.normal_(parameter, std=0.2)  # they start at 0
    for name, buffer in model.named_buffers():
        if name.endswith(("std_bias", "std_scale")):
            torch.nn.init.normal_(buffer)
        elif name.endswith(("_min", "_max")):  # limits of linear layers
            buffer.fill_(-2.0 if name.endswith("_min") else 2.0)
    model.save_pretrained(path)
    return path


def random_image(family: str, number: int) -> Image:
    """Return an image of random pixels; sizes differ between images if the family allows it."""
    rng = np.random.default_rng(number)
    if family in GRID_FAMILIES:
        height, width = {4: (1, 5), 5: (5, 1)}.get(number, rng.integers(1, 5, 2))
        shape = (3, 8, 8) if family == "paddleocr_vl" else (3 * 2 * 8 * 8,)
        patches = rng.standard_normal((4 * height * width, *shape)).astype(np.float32)
        inputs = {
            "pixel_values": patches,
            "image_grid_thw": np.array([[1, 2 * height, 2 * width]]),
        }
        return Image(number, lambda: inputs, int(height * width), (int(height), int(width)))
    if family in PATCH_FAMILIES:
        height, width = rng.integers(1, (3, 4))
        return image_of_patches(family, number, int(height), int(width))
    if family == "mistral3":
        height, width = 16 * rng.integers(1, 4, 2)
        pixels = rng.standard_normal((1, 3, height, width)).astype(np.float32)
        sizes = np.array([[height, width]])
        inputs = {"pixel_values": pixels, "image_sizes": sizes}
        return Image(number, lambda: inputs, height * width // 256)
    if family in ("deepseek_ocr2", "unlimited_ocr"):
        return _random_page(family, number)
    if family == "lfm2_vl":
        return _random_tiles(number)
    count = int(rng.integers(1, 4)) if family == "internvl" else 1
    pixels = rng.standard_normal((count, 3, 32, 32)).astype(np.float32)
    num_tokens = count * (4 if family in ("gemma3", "internvl") else 16)
    both_ways = family == "gemma3"
    return Image(number, lambda: {"pixel_values": pixels}, num_tokens, attends_both_ways=both_ways)


def image_of_patches(family: str, number: int, height: int, width: int) -> Image:
    """Return an image of Gemma 4 with ``height`` x ``width`` tokens. Four patches are one token,
    except in the unified models."""
    rng = np.random.default_rng((number, height, width))
    across, channels = (1, 3 * 8 * 8) if family == "gemma4_unified" else (2, 3 * 4 * 4)
    columns, rows = np.meshgrid(np.arange(across * width), np.arange(across * height))
    positions = np.stack([columns.ravel(), rows.ravel()], axis=1)
    inputs = {
        "pixel_values": rng.random((1, len(positions), channels), dtype=np.float32),
        "image_position_ids": positions[None],
    }
    both_ways = family != "gemma4_e4b"
    return Image(number, lambda: inputs, height * width, attends_both_ways=both_ways)


def _random_page(family: str, number: int) -> Image:
    """Return an image with a whole view, and most with tiles."""
    rng = np.random.default_rng(number)
    columns = 1 + number % 3 if number % 3 else 0
    rows = min(columns, 1 if family == "deepseek_ocr2" else 2)
    whole, tile = (80, 80) if family == "deepseek_ocr2" else (64, 32)
    inputs = {
        "pixel_values": rng.standard_normal((1, 3, whole, whole)).astype(np.float32),
        "num_local_patches": np.array([columns * rows]),
    }
    if columns:
        shape = (columns * rows, 3, tile, tile)
        inputs["pixel_values_local"] = rng.standard_normal(shape).astype(np.float32)
    if family == "deepseek_ocr2":
        return Image(number, lambda: inputs, 144 * (1 + columns * rows) + 1)
    inputs["patches_grid"] = np.array([[max(columns, 1), max(rows, 1)]])
    # Each row of the whole view and of the tiles ends with a token for a new line.
    return Image(number, lambda: inputs, 2 * 3 + 1 + rows * (columns + 1))


def _random_tiles(number: int) -> Image:
    """Return an image of LFM2-VL with up to three tiles of different sizes."""
    rng = np.random.default_rng(number)
    shapes = 2 * rng.integers(1, 4, (1 + number % 3, 2))
    most, lengths = 36, shapes.prod(axis=1)
    inputs = {
        "pixel_values": rng.standard_normal((len(shapes), most, 8 * 8 * 3)).astype(np.float32),
        "pixel_attention_mask": (np.arange(most) < lengths[:, None]).astype(np.int32),
        "spatial_shapes": shapes,
    }
    return Image(number, lambda: inputs, int(lengths.sum()) // 4)
