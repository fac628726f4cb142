"""Creates random models of real architectures, so that benchmarks need no download.

python benchmarks/models.py FOLDER     # writes FOLDER/small, 88 M parameters
python benchmarks/models.py FOLDER --shape large     # 1.0 B, in bfloat16
python benchmarks/models.py FOLDER --shape hybrid    # 97 M: recurrent layers and attention
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

VOCAB_SIZE = 8192
SMALL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
HYBRID = {
    **SMALL,
    "head_dim": 64,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
"""``SMALL`` with Qwen3.5's layers: three Gated DeltaNet layers for each attention layer."""


def make_small(path: Path, max_positions: int = 2048) -> Path:
    """Create a Llama of 88 M parameters in float32."""
    return _make(path, SMALL, torch.float32, max_positions)


def make_large(path: Path, max_positions: int = 2048) -> Path:
    """Create a Llama of 1.0 B parameters in bfloat16."""
    return _make(path, LARGE, torch.bfloat16, max_positions)


def make_hybrid(path: Path, max_positions: int = 2048) -> Path:
    """Create a model of 97 M parameters with recurrent layers, in float32."""
    return _make(path, HYBRID, torch.float32, max_positions)


MAKERS = {"small": make_small, "large": make_large, "hybrid": make_hybrid}


def _make(path: Path, shape: dict[str, int], dtype: torch.dtype, max_positions: int) -> Path:
    if (path / "config.json").exists():
        return path
    torch.manual_seed(0)
    config_class, model_class = (
        (Qwen3_5TextConfig, Qwen3_5ForCausalLM)
        if "linear_num_key_heads" in shape
        else (LlamaConfig, LlamaForCausalLM)
    )
    config = config_class(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.08,  # wide, so that the most likely token is clear
        **shape,
    )
    model: PreTrainedModel = model_class(config)
    model.to(dtype).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{at}": at for at in range(VOCAB_SIZE)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="small", choices=MAKERS)
    args = parser.parse_args()
    MAKERS[args.shape](args.folder / args.shape)
