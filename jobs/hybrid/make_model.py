"""Writes the hybrid job's model: a random Qwen3.5 language model for the quickstart's tokenizer.

Three of four layers are Gated DeltaNet, as in the published models. Its answers mean nothing; the
job shows how a hybrid's memory is used.

    python jobs/hybrid/make_model.py             # writes jobs/hybrid/model/
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Write the model and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(HERE.parent / "quickstart" / "model")
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")


if __name__ == "__main__":
    main()
