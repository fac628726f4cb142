"""Models with random weights on a fake device, for which their folders need no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchinfer import LLM
from tests.fake_cuda.device import FakeCuda
from tests.models import tiny_config

# A fake device computes large models as fast as tiny ones.
QWEN3_06B: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
LLAMA_8B: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 151_936,  # of Qwen3, because the compile report has sampling for one vocabulary
    "max_position_embeddings": 131_072,
}
QWEN3_30B: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}
_FEW = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "swap_space": 0, "num_kv_blocks": 64}


def load_model(
    fake_cuda: FakeCuda, folder: Path, family: str, shape: dict[str, Any], **settings: Any
) -> LLM:
    """Load a model with a few small CUDA graphs.

    Args:
        shape: values of the model's config that replace those of ``tiny_config``.
        settings: arguments of ``LLM``.
    """
    tiny_config(family, **{"dtype": "bfloat16"} | shape).save_pretrained(folder)
    with fake_cuda.loading():
        return LLM(
            folder, load_format="dummy", device="cuda", skip_tokenizer_init=True, **_FEW | settings
        )
