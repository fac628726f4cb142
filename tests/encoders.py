"""Tiny random encoders, one of each family, and transformers' hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", "of", "the", "and"]
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": len(_WORDS),
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_OFFSET = {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 50}
_GROUPS = {"num_key_value_heads": 2}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "bert": {},
    "roberta": _OFFSET,
    "xlm-roberta": _OFFSET,
    "camembert": _OFFSET,
    "electra": {"embedding_size": 16},
    "mpnet": {"pad_token_id": 1, "max_position_embeddings": 50},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "modernbert": {
        "local_attention": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        **{"cls_token_id": 2, "sep_token_id": 3},
    },
    "nomic_bert": {},
    "eurobert": _GROUPS,
    "gemma3_text": {
        **_GROUPS,
        "head_dim": 8,
        "sliding_window": 6,
        "use_bidirectional_attention": True,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen2": {**_GROUPS, "is_causal": False},
    "llama": {**_GROUPS, "is_causal": False},
}
"""Config keys of each ``model_type``, besides the common keys."""
CAUSAL_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": _GROUPS,
    "qwen3": {**_GROUPS, "head_dim": 8},
    "mistral": {**_GROUPS, "head_dim": 8, "sliding_window": 6},
    "gemma3_text": {k: v for k, v in FAMILIES["gemma3_text"].items() if k[:4] != "use_"},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48},
    "qwen3_moe": {
        **{**_GROUPS, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
        "moe_intermediate_size": 32,
    },
}
"""Config keys of families with causal attention."""
_RENAMED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def encoder_config(family: str) -> dict[str, Any]:
    """Return the keys of a family's tiny config."""
    keys = {**_SIZES, **FAMILIES[family]}
    return {k: v for k, v in keys.items() if family != "distilbert" or k not in _RENAMED}


def make_encoder(
    folder: Path, family: str, max_length: int = 40, *, causal: bool = False, **changes: Any
) -> Path:
    """Save a tiny random model of a family, with a tokenizer of letters.

    Args:
        causal: use ``CAUSAL_FAMILIES``.
        changes: changes to the config.
    """
    torch.manual_seed(0)
    keys = {**_SIZES, **CAUSAL_FAMILIES[family]} if causal else encoder_config(family)
    keys = {**keys, **changes}
    model = AutoModel.from_config(AutoConfig.for_model(family, **keys))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder, max_length)
    return folder


def save_tokenizer(folder: Path, max_length: int, *, segments: bool = True) -> None:
    """Save a tokenizer of letters like BERT's, which truncates texts to ``max_length`` tokens.

    Args:
        segments: the tokenizer marks the tokens of a pair's second text.
    """
    backend = Tokenizer(models.WordLevel({w: at for at, w in enumerate(_WORDS)}, "[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=max_length, model_input_names=inputs, **names
    ).save_pretrained(folder)


def reference_states(
    folder: Path, sequences: Sequence[Sequence[int]]
) -> list[npt.NDArray[np.float32]]:
    """Return transformers' hidden states [L, H] of each sequence, computed one at a time."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in sequences]
