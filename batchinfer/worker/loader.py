"""Loads a model of transformers' own classes, ready for paged attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedConfig

from batchinfer.engine.kv.layout import KVLayout, max_positions
from batchinfer.errors import ModelError
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.fusion.native_join import join_native_layers
from batchinfer.worker.fusion.native_layers import fuse_native_layers
from batchinfer.worker.lora.checkpoint import read_adapters
from batchinfer.worker.lora.lora import add_adapters
from batchinfer.worker.memory import model_bytes
from batchinfer.worker.model.checkpoint import check_weights, resolve_folder
from batchinfer.worker.model.config import load_config
from batchinfer.worker.model.quantization import check_quantization, saved_quantization
from batchinfer.worker.model.rope import fix_longrope
from batchinfer.worker.model.tokenizer import eos_token_ids, num_tokenizer_ids
from batchinfer.worker.model.weights import choose_dtype, load_weights
from batchinfer.worker.products.choice import (
    TORCH_MULTIPLIES,
    KernelChoice,
    KernelWish,
    choose_kernel,
)
from batchinfer.worker.products.int8 import quantize_packed
from batchinfer.worker.products.linear import pack_linears
from batchinfer.worker.self_check import check_model

_ANY_KERNELS = KernelWish()


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
    adapters: Mapping[str, int]
    """Number of each adapter, from 1."""
    adapter_bytes: int
    kernels: KernelChoice
    """What multiplies by the weights that are not quantised."""
    kernel_names: Mapping[str, str]
    """What multiplies, by the dtype of the weights."""
    facts: Mapping[str, Any]
    """For the summary: name, revision, family, parameters, bytes."""

    def layout(self, block_size: int, kv_cache_dtype: str = "auto") -> KVLayout:
        """How the model's KV is laid out in blocks of ``block_size`` tokens."""
        return KVLayout.from_config(
            self.config,
            block_size=block_size,
            dtype=self.dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=self.max_model_len,
        )


def load_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: torch.device,
    max_model_len: int | None = None,
    quantization: str | None = None,
    adapters: Mapping[str, str] | None = None,
    kernels: KernelWish = _ANY_KERNELS,
) -> LoadedModel:
    """Check a model folder (or hub id), load its weights and try four tokens.

    Args:
        dtype: ``auto`` keeps the dtype the weights are saved in.
        max_model_len: None takes what the model's config allows.
        quantization: how to quantise the weights; None: as they are saved.
        adapters: folder or hub id of LoRA adapters by name; rows run through them by number, in
            this order from 1.
        kernels: what is to multiply, on a CPU.

    Raises:
        ModelError: in one line with what to do; nothing from the folder is executed.
        DeviceError: the weights do not fit the device, or no such kernels are there.
    """
    folder = resolve_folder(name, revision)
    config = load_config(folder)
    values = config.to_dict()
    check_quantization(values, quantization, device.type)
    longest = choose_max_model_len(values, max_model_len)
    _check_vocabulary(folder, config)
    found = read_adapters(adapters or {}, config)
    end_ids = eos_token_ids(folder, values, config.get_text_config().vocab_size)
    dtype = choose_dtype(dtype, values, check_weights(folder))
    load = partial(load_weights, folder, config, dtype, device, quantization)
    model = load()
    num_parameters = sum(p.numel() for p in model.parameters())
    layout = KVLayout.from_config(values, block_size=16, dtype=dtype)
    fix_longrope(model, longest)
    check_model(model, layout)
    if not fuse(model, layout, longest):
        model = load()
        fix_longrope(model, longest)
    choice, names = TORCH_MULTIPLIES, {}
    if device.type == "cpu":
        if quantization == "int8":
            names["int8"] = quantize_packed(model, getattr(torch, dtype)).name
        choice = choose_kernel(model, getattr(torch, dtype), kernels)
        if choice.kernel is not None:
            pack_linears(model, choice.kernel, getattr(torch, dtype))
        _let_go_of_file(model)
        fuse_native_layers(model, layout)
    else:
        torch.cuda.empty_cache()  # merged weights left holes of the size of their parts
    weight_bytes = model_bytes(model)
    if found:
        add_adapters(model, layout, found, choice.kernel)
    elif device.type == "cpu":
        join_native_layers(model, layout)
    return LoadedModel(
        model=model,
        config=values,
        max_model_len=longest,
        eos_token_ids=end_ids,
        dtype=dtype,
        adapters=MappingProxyType({one.name: at for at, one in enumerate(found, start=1)}),
        adapter_bytes=model_bytes(model) - weight_bytes,
        kernels=choice,
        kernel_names=MappingProxyType({dtype: choice.name, **names}),
        facts={
            "name": name,
            "revision": revision,
            "family": config.model_type,
            "dtype": dtype,
            "quantization": quantization or saved_quantization(values),
            "parameters": num_parameters,
            "weight_bytes": weight_bytes,
            "adapter_bytes": model_bytes(model) - weight_bytes,
            "max_model_len": longest,
        },
    )


def _let_go_of_file(model: torch.nn.Module) -> None:
    """Copy what was not packed out of the mapped weight files: one tensor keeps all of a file."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and not tensor.is_inference():  # merged: not the file's
            tensor.data = tensor.data.clone()


def choose_max_model_len(values: Mapping[str, Any], wanted: int | None) -> int:
    """``wanted``, or else the longest sequence that the config ``values`` allow, in tokens.

    Raises:
        ModelError: it is too short or too long, or neither says.
    """
    allowed = max_positions(values)
    if wanted is None and allowed is None:
        raise ModelError("the model's config sets no longest sequence; give model.max_model_len")
    if wanted is not None and wanted < 2:
        raise ModelError(
            f"model.max_model_len is {wanted}; it must be 2 or more, to hold a prompt and an output"
        )
    if wanted is not None and allowed is not None and wanted > allowed:
        raise ModelError(
            f"model.max_model_len is {wanted}; the model's config allows at most {allowed}"
        )
    longest = wanted if wanted is not None else allowed
    assert longest is not None
    if longest < 2:
        raise ModelError(
            f"the model's config allows {longest} tokens; a prompt and an output need 2"
        )
    return longest


def _check_vocabulary(folder: Path, config: PreTrainedConfig) -> None:
    ids, rows = num_tokenizer_ids(folder), config.get_text_config().vocab_size
    if ids > rows:
        raise ModelError(
            f"{folder}: the tokenizer has ids up to {ids - 1} and the model {rows} embeddings; "
            "they do not belong together"
        )
