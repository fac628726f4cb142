"""Loads a model's weights, and checks that config.json and the weight files belong together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.attention import ATTENTION_NAME, register
from batchinfer.worker.quiet import quiet_transformers

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NAMES_SHOWN = 3


def choose_dtype(wanted: str, values: Mapping[str, Any], saved: Mapping[str, str]) -> str:
    """The dtype to load in, by torch's name.

    Args:
        wanted: ``auto`` or torch's name.
        values: the model's config.
        saved: the dtypes of the tensors in the files, as safetensors writes them.

    Raises:
        ModelError: the model is saved in a dtype that it cannot be run in.
    """
    if wanted != "auto":
        return wanted
    named = values.get("dtype") or values.get("torch_dtype")
    name = str(named or _SAFETENSORS_DTYPES.get(next(iter(saved.values()), ""), "float32"))
    name = name.removeprefix("torch.")
    if name not in _SAFETENSORS_DTYPES.values():
        raise ModelError(f"the model is saved as {name}; give model.dtype: bfloat16 or float32")
    return name


def load_weights(
    folder: Path, config: PreTrainedConfig, dtype: str, device: torch.device
) -> torch.nn.Module:
    """transformers' own model of the config, filled from the folder, on the device.

    Raises:
        ModelError: the files cannot be read, or are not of the model that the config describes.
        DeviceError: the weights do not fit the device.
    """
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
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
            )
        _check_complete(folder, found)
        model = model.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise DeviceError("the model's weights do not fit the device; use a smaller one") from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{folder}: the weights cannot be loaded: {reason}") from error
    assert isinstance(model, torch.nn.Module)
    return model


def _check_complete(folder: Path, found: Mapping[str, Any]) -> None:
    """Every parameter is filled and every tensor used, but for those transformers knows to be
    spare: tied embeddings, buffers of older versions, heads for other uses."""
    mismatched = sorted(found["mismatched_keys"])
    missing = found["missing_keys"] - {name for name, *_ in mismatched}  # they are in both lists
    unused = found["unexpected_keys"]
    if missing:
        problem = f"{len(missing)} tensors are missing from the weight files: {_some(missing)}"
    elif mismatched:
        name, saved, wanted = mismatched[0]
        problem = f"{name} is {_shape(saved)}, by config.json it should be {_shape(wanted)}"
    elif unused:
        problem = (
            f"the weight files have {len(unused)} tensors that have no place in the model that "
            f"config.json describes: {_some(unused)}"
        )
    else:
        return
    raise ModelError(
        f"{folder}: {problem}; take config.json and the safetensors files from the same model, "
        "or fetch the model again"
    )


def _some(names: Collection[str]) -> str:
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:_NAMES_SHOWN]) + more


def _shape(size: Collection[int]) -> str:
    return " x ".join(map(str, size)) or "a single number"
