"""LoRA adapters of tiny models, made and run by peft."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def make_adapter(model: Any, path: Path, *, seed: int, **config: Any) -> torch.nn.Module:
    """Save a random adapter of a model; return peft's model, which changes ``model``."""
    from peft import LoraConfig, get_peft_model

    transposed = model.config.model_type == "gpt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns about every choice
        adapted = get_peft_model(model, LoraConfig(fan_in_fan_out=transposed, **config))
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(str(path), save_embedding_layers=False)
    return adapted.eval()


def change_adapter(
    path: Path, config: dict[str, Any] | None = None, rename: dict[str, str] | None = None
) -> Path:
    """Change keys of adapter_config.json, and names (or parts of names) of tensors."""
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
    tensors = load_file(path / "adapter_model.safetensors")
    for old, new in (rename or {}).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "adapter_model.safetensors")
    return path
