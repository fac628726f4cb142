"""Loads a model's tokenizer, with its chat template."""

from __future__ import annotations

from batchinfer.config import ModelConfig
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.worker.model.tokenizer import load_tokenizer, lower_cased, lowers_case


def make_tokenizer(model: ModelConfig) -> Tokenizer:
    """Load the tokenizer that ``model.tokenizer`` names, or else the model's own tokenizer.

    Raises:
        ModelError: the tokenizer is missing or cannot be used.
    """
    parts = load_tokenizer(
        model.tokenizer or model.name,
        # ``model.revision`` is only for the model's repository.
        revision=None if model.tokenizer else model.revision,
        key="model.tokenizer" if model.tokenizer else "model.name",
    )
    backend = parts.backend
    if model.pools and lowers_case(model.name, model.revision):
        backend = lower_cased(backend)
    return Tokenizer(
        backend,
        chat_template=parts.chat_template,
        special_tokens=parts.special_tokens,
        control_tokens=parts.control_tokens,
        clean_up_tokenization_spaces=parts.clean_up_tokenization_spaces,
        has_token_type_ids=parts.has_token_type_ids,
    )
