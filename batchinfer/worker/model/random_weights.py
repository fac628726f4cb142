"""A model of random weights: what a config.json describes, without the files of its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.attention.attention import ATTENTION_NAME, register
from batchinfer.worker.model.meta_model import described
from batchinfer.worker.model.quantization import TORCHAO_METHODS, quantize, saved_section
from batchinfer.worker.model.quiet import quiet_transformers
from batchinfer.worker.model.text_half import text_half
from batchinfer.worker.model.weights import fix_longrope

_SEED = 0


def make_random_weights(
    folder: Path,
    config: PreTrainedConfig,
    dtype: str,
    device: torch.device,
    max_model_len: int,
    quantization: str | None = None,
    show_share: Callable[[float], None] = lambda share: None,
) -> torch.nn.Module:
    """Make transformers' own model of the config with the weights that its class begins a training
    with, the same each time on a device. Arguments are those of ``load_weights``.

    Raises:
        ModelError: the config's weights are quantized, or transformers cannot make them.
        DeviceError: the weights do not fit the device.
    """
    if saved_section(config.to_dict()):
        raise ModelError(
            f"{folder}/config.json: its weights are saved quantized (quantization_config), and "
            "random ones are not; take quantization_config out of it"
        )
    register()
    devices = [device] if device.type == "cuda" else []
    try:
        with quiet_transformers(show_share), torch.random.fork_rng(devices), device:
            torch.manual_seed(_SEED)
            model = AutoModelForCausalLM.from_config(
                text_half(config),
                dtype=getattr(torch, dtype),
                attn_implementation=ATTENTION_NAME,
            )
        if quantization in TORCHAO_METHODS:
            quantize(model, quantization, device)
    except torch.OutOfMemoryError as error:
        raise DeviceError("the model's weights do not fit the device; use a smaller one") from error
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(f"{folder}: no weights can be made: {described(error)}") from error
    assert isinstance(model, torch.nn.Module)
    fix_longrope(model, max_model_len)
    return model.eval().requires_grad_(False)
