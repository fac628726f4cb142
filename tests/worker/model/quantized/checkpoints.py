"""Tiny quantized checkpoints, each with a float checkpoint of the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models import make_checkpoint
from tests.worker.model.quantized.writers import Writer
from tests.wrappers import FAMILIES as WRAPPERS
from tests.wrappers import make_wrapper

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def write_quantized(
    folder: Path, family: str, section: Mapping[str, Any], writer: Writer, **changes: Any
) -> tuple[Path, Path]:
    """Write a random model whose linear layers are quantized.

    Args:
        folder: the folder to write into.
        family: the model's family.
        section: config.json's ``quantization_config``.
        writer: quantizes a layer's weight, or the tensor of all experts if it is saved as one.
        changes: changes to the family's config.

    Returns:
        The model's folder, and the folder of a float model with the dequantized weights.
    """
    torch.manual_seed(1)
    float_model = folder / "float"
    if family in WRAPPERS:
        make_wrapper(family, float_model, **changes)
    else:
        make_checkpoint(family, float_model, **{**WIDE, **changes})
    saved = load_file(float_model / "model.safetensors")
    quantized, plain = dict(saved), dict(saved)
    for name, weight in saved.items():
        if _is_quantized(name, weight):
            del quantized[name]
            written = writer(weight)
            layer = name.removesuffix("weight")
            quantized |= {layer + end: part.contiguous() for end, part in written.parts.items()}
            plain[name] = written.weight.contiguous()
    config = json.loads((float_model / "config.json").read_text())
    folders = folder / "quantized", folder / "plain"
    for path, tensors, more in zip(
        folders, (quantized, plain), ({"quantization_config": section}, {}), strict=True
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return folders


def _is_quantized(name: str, weight: torch.Tensor) -> bool:
    left_out = ("norm.weight", "gate.weight", "router.weight", "bias", "sinks", "A_log")
    if name.endswith((*left_out, "conv1d.weight", "conv.conv.weight")):
        return False
    return weight.dim() == 3 or ("layers." in name and weight.dim() == 2)
