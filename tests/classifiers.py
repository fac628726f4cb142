"""Tiny random models that classify, and transformers' results for the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.models import tiny_config

TEXT_IDS = {"bos_token_id": 0, "eos_token_id": 2, "vocab_size": 259}
"""Config keys that fit the byte tokenizer of ``make_text_model``."""


def make_classifier(path: Path, text_model: Path, family: str = "llama", **changes: Any) -> Path:
    """Save a tiny random classifier with the byte tokenizer, which joins pairs with ``<s>``."""
    torch.manual_seed(0)
    config = tiny_config(family, **{**TEXT_IDS, **changes})
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.to(changes.get("dtype", torch.float32)).save_pretrained(path)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(text_model)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A:0 <s> $B:1", special_tokens=[("<s>", 0)]
    )
    tokenizer.save_pretrained(path)
    return path


def logits(model: Path, *texts: str) -> torch.Tensor:
    """Return transformers' logits for one text or pair."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = reference(**tokenizer(*texts, return_tensors="pt")).logits[0]
    return found


def make_reranker(path: Path, text_model: Path) -> tuple[Path, list[int]]:
    """Save a tiny Qwen3 that answers "no" or "yes"; return its folder and both token ids."""
    torch.manual_seed(0)
    config = tiny_config("qwen3", **{**TEXT_IDS, "vocab_size": 261})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(text_model)
    tokenizer.add_tokens(["no", "yes"])
    tokenizer.save_pretrained(path)
    return path, tokenizer.convert_tokens_to_ids(["no", "yes"])


def probability(model: Path, prompt: str, ids: list[int]) -> float:
    """Return transformers' probability of the second token, with softmax over both tokens."""
    inputs = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt")
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return float(reference(**inputs).logits[0, -1, ids].softmax(-1)[1])
