"""Creates a vision-language model with random weights and the layers of Qwen3-VL, and a tokenizer
and an image processor for it. The model has 88 M parameters for text and 26 M for images."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

VOCAB_SIZE = 8192
TOKENS = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 12,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_heads": 6,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 768,
    "num_position_embeddings": 48**2,
    "deepstack_visual_indexes": [3, 6, 9],
}


def make_seeing(path: Path) -> Path:
    """Create the model in float32, unless the folder exists."""
    if (path / "processor_config.json").exists():
        return path
    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*TOKENS.values(), *letters]
    words += [f"<w{at}>" for at in range(VOCAB_SIZE - len(words))]
    vocabulary = {word: at for at, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=TOKENS, pad_token="<|vision_end|>"
    ).save_pretrained(path)
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": 64 * 64, "longest_edge": 1024 * 1024},
        patch_size=VISION["patch_size"],
        merge_size=VISION["spatial_merge_size"],
    ).save_pretrained(path)
    ids = {f"{name}_id": vocabulary[text] for name, text in TOKENS.items()}
    config = Qwen3VLConfig(
        text_config={**TEXT, "initializer_range": 0.08},
        vision_config={**VISION, "initializer_range": 0.08},
        **ids,
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    (path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
    return path
