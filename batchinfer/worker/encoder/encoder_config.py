"""Reads an encoder's config, maximum text length and dtype from its folder, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from batchinfer.config import ModelConfig, attends_both_ways, longest_text, position_offset
from batchinfer.engine.kv.model_config import text_config
from batchinfer.engine.kv.recurrent_families import is_recurrent
from batchinfer.errors import ModelError, one_line
from batchinfer.worker.model.check_weight_files import check_weights
from batchinfer.worker.model.config import check_family, config_of
from batchinfer.worker.model.model_folder import (
    ALL_FILES,
    CONFIG_FILES,
    read_config,
    read_json,
    resolve_folder,
)
from batchinfer.worker.model.tokenizer import check_vocabulary
from batchinfer.worker.model.weights import choose_dtype


@dataclass(frozen=True)
class EncoderDescription:
    folder: Path
    pretrained: PreTrainedConfig
    config: Mapping[str, Any]
    max_model_len: int
    dtype: str

    @property
    def vocab_size(self) -> int:
        return int(text_config(self.config)["vocab_size"])


def is_run_as_encoder(model: ModelConfig) -> bool:
    """Return True if a model is run as an encoder: its tokens attend to later tokens, or a task
    pools all hidden states of a text.

    Raises:
        ModelError: the model does not exist, or its config.json cannot be read.
    """
    if model.runner != "pooling":
        return model.runner == "whole_texts"
    return attends_both_ways(read_config(_folder(model, CONFIG_FILES)))


def describe_encoder(model: ModelConfig, *, weights_too: bool = False) -> EncoderDescription:
    """Read and check the folder (or hub id) of a model for which ``is_run_as_encoder`` is true. If
    ``weights_too``, also fetch the weight files and check their headers.

    Raises:
        ModelError: the model cannot be run as an encoder. The message names the file or the key.
    """
    folder = _folder(model, ALL_FILES if weights_too else CONFIG_FILES)
    pretrained = _config(folder)
    values = pretrained.to_dict()
    for key in ("adapters", "quantization"):
        if getattr(model, key):
            raise ModelError(
                f"model.{key} with an encoder model is not yet supported by this version",
                hint="remove the key",
            )
    if is_recurrent(text_config(values)):
        raise ModelError(
            f"{folder}/config.json: models of the family {pretrained.model_type!r} "
            "have recurrent layers, which cannot compute whole texts in one step",
            hint="set embed.pooling: lasttoken",
        )
    check_vocabulary(folder, model.tokenizer, int(text_config(values)["vocab_size"]))
    saved = check_weights(folder) if weights_too else {}
    return EncoderDescription(
        folder,
        pretrained,
        values,
        _longest_text(folder, values, model.max_model_len),
        choose_dtype(model.dtype, values, saved),
    )


def _folder(model: ModelConfig, patterns: tuple[str, ...]) -> Path:
    return resolve_folder(model.name, model.revision, patterns)


def _config(folder: Path) -> PreTrainedConfig:
    family = check_family(folder, read_config(folder))
    try:
        config = config_of(folder)
    except Exception as error:  # a config's validation raises errors of several libraries
        raise ModelError(f"{folder}/config.json: {one_line(error, 200)}") from error
    if type(config) not in MODEL_MAPPING:
        raise ModelError(
            f"{folder}/config.json: models of the family {family!r} have no hidden states to embed"
        )
    return config


def _longest_text(folder: Path, values: Mapping[str, Any], wanted: int | None) -> int:
    """Return ``wanted`` if set, else the length to which sentence-transformers truncates texts:
    ``max_seq_length`` of sentence_bert_config.json, or else the tokenizer's ``model_max_length``,
    limited to the model's positions."""
    positions = text_config(values).get("max_position_embeddings")
    allowed = None if positions is None else int(positions) - position_offset(values)
    if wanted is not None:
        if allowed is not None and wanted > allowed:
            raise ModelError(
                f"model.max_model_len is {wanted}, but the model's config allows at most {allowed}"
            )
        return wanted
    path = folder / "sentence_bert_config.json"
    try:
        named: Any = longest_text(read_json(path) or {})
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
    if named is None:
        named = (read_json(folder / "tokenizer_config.json") or {}).get("model_max_length")
    lengths = [value for value in (named, allowed) if isinstance(value, int | float) and value > 0]
    if not lengths:
        raise ModelError("the model's config sets no maximum length; set model.max_model_len")
    return int(min(lengths))
