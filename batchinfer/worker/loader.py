"""Loads a model of transformers' own classes, ready for paged attention."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from batchinfer.engine.layout import KVLayout, max_positions, refuse_unsupported
from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.attention import ATTENTION_NAME, register
from batchinfer.worker.linear import pack_linears
from batchinfer.worker.model_files import check_weights, read_config, resolve_folder
from batchinfer.worker.quiet import quiet_transformers
from batchinfer.worker.rope import fix_longrope
from batchinfer.worker.runner import model_bytes
from batchinfer.worker.self_check import check_model
from batchinfer.worker.tokenizer_files import eos_token_ids, num_tokenizer_ids

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and what the other planes need to know about it."""

    model: torch.nn.Module
    config: Mapping[str, Any]
    """The config with its family's defaults filled in."""
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    eos_token_ids: frozenset[int]
    dtype: str
    facts: Mapping[str, Any]
    """For the summary: name, revision, family, parameters, bytes."""

    def layout(self, block_size: int) -> KVLayout:
        """How the model's KV is laid out in blocks of ``block_size`` tokens."""
        return KVLayout.from_config(self.config, block_size=block_size, dtype=self.dtype)


def load_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: torch.device,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Check a model folder (or hub id), load its weights and try four tokens.

    Args:
        dtype: ``auto`` keeps the dtype the weights are saved in.
        max_model_len: None takes what the model's config allows.

    Raises:
        ModelError: in one line with what to do; nothing from the folder is executed.
        DeviceError: the weights do not fit the device.
    """
    folder = resolve_folder(name, revision)
    config = _config(folder)
    values = config.to_dict()
    longest = _max_model_len(values, max_model_len)
    _check_class(config)
    _check_vocabulary(folder, config)
    dtype = _dtype(dtype, values, check_weights(folder))
    model = _load_weights(folder, config, dtype, device)
    num_parameters = sum(p.numel() for p in model.parameters())
    if device.type == "cpu":
        pack_linears(model, getattr(torch, dtype))
    fix_longrope(model, longest)
    check_model(model, KVLayout.from_config(values, block_size=16, dtype=dtype))
    return LoadedModel(
        model=model,
        config=values,
        max_model_len=longest,
        eos_token_ids=eos_token_ids(folder, values),
        dtype=dtype,
        facts={
            "name": name,
            "revision": revision,
            "family": config.model_type,
            "dtype": dtype,
            "parameters": num_parameters,
            "weight_bytes": model_bytes(model),
            "max_model_len": longest,
        },
    )


def _config(folder: Path) -> PreTrainedConfig:
    """The folder's config, of a family that can be run."""
    raw = read_config(folder)
    family = raw.get("model_type")
    if family not in CONFIG_MAPPING:
        raise ModelError(
            f"{folder}/config.json: transformers {transformers.__version__} has no model of the "
            f"type {family!r}; a later version may"
        )
    try:
        refuse_unsupported(raw)
        with quiet_transformers():
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        KVLayout.from_config(config.to_dict(), block_size=1, dtype="float32")
    except Exception as error:  # a config's own validation raises errors of several libraries
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder}/config.json: {reason}") from error
    return config


def _max_model_len(values: Mapping[str, Any], wanted: int | None) -> int:
    allowed = max_positions(values)
    if wanted is None and allowed is None:
        raise ModelError("the model's config sets no longest sequence; give model.max_model_len")
    if wanted is not None and allowed is not None and wanted > allowed:
        raise ModelError(
            f"model.max_model_len is {wanted}; the model's config allows at most {allowed}"
        )
    longest = wanted if wanted is not None else allowed
    assert longest is not None
    return longest


def _check_class(config: PreTrainedConfig) -> None:
    """Refuse what is no text generator, and classes whose attention cannot be replaced."""
    family = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"models of the family {family!r} cannot be run: they do not write text")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    saved = config.architectures or [model_class.__name__]
    if model_class.__name__ not in saved:
        raise ModelError(f"the model is a {saved[0]}; only {model_class.__name__} writes text")
    replaceable = hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")
    if not replaceable or "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise ModelError(
            f"models of the family {family!r} cannot be run: transformers "
            f"{transformers.__version__} does not let their attention be replaced"
        )


def _check_vocabulary(folder: Path, config: PreTrainedConfig) -> None:
    ids, rows = num_tokenizer_ids(folder), config.get_text_config().vocab_size
    if ids > rows:
        raise ModelError(
            f"{folder}: the tokenizer has ids up to {ids - 1} and the model {rows} embeddings; "
            "they do not belong together"
        )


def _dtype(wanted: str, values: Mapping[str, Any], saved: Mapping[str, str]) -> str:
    """The dtype to load in, by torch's name."""
    if wanted != "auto":
        return wanted
    named = values.get("dtype") or values.get("torch_dtype")
    name = str(named or _SAFETENSORS_DTYPES.get(next(iter(saved.values()), ""), "float32"))
    name = name.removeprefix("torch.")
    if name not in _SAFETENSORS_DTYPES.values():
        raise ModelError(f"the model is saved as {name}; give model.dtype: bfloat16 or float32")
    return name


def _load_weights(
    folder: Path, config: PreTrainedConfig, dtype: str, device: torch.device
) -> torch.nn.Module:
    register()
    try:
        with quiet_transformers():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        missing = sorted(found["missing_keys"])
        if missing:
            raise ModelError(
                f"{folder}: {len(missing)} tensors are missing, {missing[0]} among them; "
                "fetch the model again"
            )
        model = model.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise DeviceError("the model's weights do not fit the device; use a smaller one") from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{folder}: the weights cannot be loaded: {reason}") from error
    assert isinstance(model, torch.nn.Module)
    return model
