"""Builds the model of a config.json without memory for its weights, to check that it can be built.

If transformers cannot build a model, its error does not name the key with the wrong value.
``blame`` therefore removes or changes one key at a time, until the model can be built.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from batchinfer.errors import ModelError
from batchinfer.worker.model.config_values import readable
from batchinfer.worker.model.language_model import language_model_config
from batchinfer.worker.model.model_folder import read_config
from batchinfer.worker.model.quiet_transformers import quiet_transformers

_PARAMETERS_PER_BYTE = 4
"""Largest number of parameters per byte of a file: two with 4 bits each, doubled because a tied
output head is counted twice."""
_SMALL = 1 << 22
"""The size of a model with at most this number of parameters is not compared with the size of its
files, because it fits in memory. Loading compares the shapes."""
_SEARCH_S = 3.0
"""Time limit of the search for a key, in seconds of processor time (which does not depend on other
processes)."""
_TOKENS = 4


def build_on_meta(config: PreTrainedConfig, **options: Any) -> nn.Module:
    with quiet_transformers(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(language_model_config(config), **options)
    assert isinstance(model, nn.Module)
    return model


def check_buildable(folder: Path, config: PreTrainedConfig, file_bytes: int | None) -> None:
    """Build the model of a folder's config, and compare its size with the size of the weight files.

    Args:
        file_bytes: size of the weight files; None if they are not used.

    Raises:
        ModelError: the model cannot be built, or is far larger than the weight files. The message
            names config.json and, if known, the key.
    """
    try:
        model = build_on_meta(config)
    except Exception as error:  # a model's code raises errors of any type
        raise ModelError(
            f"{folder}/config.json: {blame(folder, build_on_meta)}transformers cannot build the "
            f"model: {described(error)}; fetch the model again"
        ) from error
    parameters = dict(model.named_parameters())
    count = sum(parameter.numel() for parameter in parameters.values())
    if file_bytes is None or count <= max(_SMALL, _PARAMETERS_PER_BYTE * file_bytes):
        return
    name = max(parameters, key=lambda name: parameters[name].numel())
    shape = tuple(parameters[name].shape)
    values = config.get_text_config().to_dict()
    keys = [key for key, value in values.items() if type(value) is int and value in shape]
    raise ModelError(
        f"{folder}/config.json describes a model of {count:,} parameters, but the "
        f"weight files have only {file_bytes:,} bytes: {name} would be "
        f"{' x '.join(map(str, shape))} "
        f"({', '.join(sorted(keys)) or 'from several sizes'}); take config.json and the "
        "safetensors files from the same model"
    )


def runs_on_meta(config: PreTrainedConfig) -> None:
    """Build the model and compute the shapes of a few tokens' logits. Errors may be of any type."""
    # torch computes the shapes of grouped matrix multiplications for bfloat16 only.
    model = build_on_meta(config, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.inference_mode():
        model(input_ids=torch.zeros((1, _TOKENS), dtype=torch.long, device="meta"))


def blame(folder: Path, attempt: Callable[[PreTrainedConfig], object]) -> str:
    """Find a key of config.json whose removal or change makes ``attempt`` succeed.

    Returns:
        The key and its value as the start of a message; "" if the search finds no key.
    """
    until = time.thread_time() + _SEARCH_S
    raw = read_config(folder)
    if _succeeds(attempt, raw):  # config.json is not the cause
        return ""
    for name, value, changed in _changes(raw):
        if time.thread_time() > until:
            break
        if _succeeds(attempt, changed):
            return f"{name} is {json.dumps(value)[:40]}: "
    return ""


def _succeeds(attempt: Callable[[PreTrainedConfig], object], raw: Mapping[str, Any]) -> bool:
    try:
        with quiet_transformers():
            attempt(CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw)))
    except Exception:  # libraries raise errors of any type
        return False
    return True


def _changes(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield each key, its value, and a config in which the family's default or 1 replaces this
    value."""
    for key, value in raw.items():
        if key != "model_type":
            yield key, value, {name: kept for name, kept in raw.items() if name != key}
        if type(value) is int:
            yield key, value, {**raw, key: 1}
        if key == "text_config" and isinstance(value, Mapping):
            for name, inner, changed in _changes(value):
                yield f"{key}.{name}", inner, {**raw, key: changed}


def described(error: Exception) -> str:
    text = readable(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
