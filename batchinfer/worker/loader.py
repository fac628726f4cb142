"""Loads a model of transformers' own classes, ready for paged attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedConfig

from batchinfer.config import ModelConfig
from batchinfer.console.phases import phase
from batchinfer.engine.kv.layout import KVLayout, max_positions, text_config
from batchinfer.errors import ModelError
from batchinfer.worker.attention.latent import check_latents, keep_latents
from batchinfer.worker.attention.temperature import temper_queries
from batchinfer.worker.family_check import check_against_eager, check_attention
from batchinfer.worker.free_memory import free_host_bytes, return_freed_memory
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.fusion.native_layers import fuse_native_layers, join_native_layers
from batchinfer.worker.linear.choice import (
    KernelChoice,
    KernelRequirements,
    choose_cuda_kernel,
    choose_kernel,
)
from batchinfer.worker.linear.experts import pack_experts
from batchinfer.worker.linear.fp8 import quantize_fp8
from batchinfer.worker.linear.packed_linear import pack_codes, pack_linears, quantize_packed
from batchinfer.worker.linear.prequantized import KEPT, keep_prequantized
from batchinfer.worker.linear_kernels import ON_CPU
from batchinfer.worker.lora.checkpoint import Adapter, read_adapters
from batchinfer.worker.lora.lora import add_adapters
from batchinfer.worker.memory import model_bytes
from batchinfer.worker.model.checkpoint import (
    ALL_FILES,
    CONFIG_FILES,
    check_weights,
    file_bytes,
    resolve_folder,
)
from batchinfer.worker.model.config import load_config
from batchinfer.worker.model.meta_model import blame, check_buildable, runs_on_meta
from batchinfer.worker.model.quantization import check_quantization, quantization_of
from batchinfer.worker.model.tokenizer import check_vocabulary, eos_token_ids
from batchinfer.worker.model.weights import choose_dtype, load_weights, uses_longrope
from batchinfer.worker.recurrent.gated_delta_net import page_recurrent_state
from batchinfer.worker.verify import probe_block_size

_ANY_KERNELS = KernelRequirements()
_ON_STRIDES = (
    " (torch multiplies all experts of a layer at once, and only where the hidden size and the "
    "experts' intermediate size take multiples of 16 bytes in the model's dtype)"
)


@dataclass(frozen=True)
class ModelDescription:
    """A model as its folder describes it, without its weights."""

    folder: Path
    pretrained: PreTrainedConfig
    config: Mapping[str, Any]
    """The config with its family's defaults filled in."""
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    eos_token_ids: frozenset[int]
    dtype: str
    lora: tuple[Adapter, ...]
    latent: bool
    """Whether its latent attention caches latents instead of expanded keys and values."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(text_config(self.config)["vocab_size"])

    @property
    def adapters(self) -> dict[str, int]:
        """Number of each adapter, from 1."""
        return {adapter.name: number for number, adapter in enumerate(self.lora, start=1)}

    def layout(self, block_size: int, kv_cache_dtype: str = "auto") -> KVLayout:
        """The layout of the model's KV in blocks of ``block_size`` tokens.

        Raises:
            ModelError: its layers attend within chunks that such blocks do not fill evenly.
        """
        try:
            return KVLayout.from_config(
                self.config,
                block_size=block_size,
                dtype=self.dtype,
                kv_cache_dtype=kv_cache_dtype,
                max_model_len=self.max_model_len,
                latent=self.latent,
            )
        except ValueError as error:
            raise ModelError(f"{self.folder}/config.json: {error}") from error


@dataclass(frozen=True)
class LoadedModel(ModelDescription):
    """A model on its device, and what the other planes need to know about it."""

    model: torch.nn.Module
    adapter_bytes: int
    kernels: KernelChoice
    """The kernel of the linear layers that are not quantized."""
    kernel_names: Mapping[str, str]
    """Kernels of the linear layers, by dtype or quantization of the weights."""
    facts: Mapping[str, Any]
    """Facts for the summary: name, revision, family, parameters, bytes."""


def describe_model(
    model: ModelConfig,
    device_type: str,
    *,
    latent: bool = False,
    weights_too: bool = False,
) -> ModelDescription:
    """Read and check a model folder (or hub id), except for its weights.

    Args:
        device_type: ``cpu`` or ``cuda``, where the model is to run.
        latent: ``engine.latent_cache``.
        weights_too: fetch them, check their headers, and use their dtype if the config has none;
            otherwise that is float32.

    Raises:
        ModelError: one line, with a remedy; nothing from the folder is executed.
    """
    with phase("fetching the model"):
        wanted = ALL_FILES if weights_too else CONFIG_FILES
        folder = resolve_folder(model.name, model.revision, wanted)
    pretrained = load_config(folder, model.runner)
    values = pretrained.to_dict()
    check_quantization(values, model.quantization, device_type)
    longest = choose_max_model_len(values, model.max_model_len)
    check_vocabulary(folder, model.tokenizer, pretrained.get_text_config().vocab_size)
    lora = read_adapters(model.adapters, pretrained)
    if latent:
        check_latents(values, device_type, (at.module for one in lora for at in one.targets))
    return ModelDescription(
        folder=folder,
        pretrained=pretrained,
        config=values,
        max_model_len=longest,
        lora=lora,
        latent=latent,
        eos_token_ids=eos_token_ids(folder, values, pretrained.get_text_config().vocab_size),
        dtype=choose_dtype(model.dtype, values, check_weights(folder) if weights_too else {}),
    )


def check_adapter(model: ModelDescription, device_type: str, adapter: Adapter) -> None:
    """Raise ModelError if an adapter cannot be used while latents are cached."""
    if model.latent:
        check_latents(model.config, device_type, (target.module for target in adapter.targets))


def load_model(
    choice: ModelConfig,
    *,
    device: torch.device,
    kernels: KernelRequirements = _ANY_KERNELS,
    latent: bool = False,
    random_weights: bool = False,
) -> LoadedModel:
    """Check a model folder (or hub id), load its weights and try a few tokens.

    Args:
        kernels: requirements on the linear layers' kernel.
        latent: ``engine.latent_cache``.
        random_weights: make up the weights and ignore the folder's.

    Raises:
        ModelError: in one line with what to do; nothing from the folder is executed.
        DeviceError: the weights do not fit the device, or it has no such kernels.
    """
    described = describe_model(choice, device.type, latent=latent, weights_too=not random_weights)
    num_bytes = None if random_weights else file_bytes(described.folder)
    check_buildable(described.folder, described.pretrained, num_bytes)
    load = partial(
        _load,
        described,
        device,
        choice.quantization,
        partial(load_weights, random=random_weights),
        num_bytes or 0,
    )
    model = load()
    num_parameters = sum(p.numel() for p in model.parameters())
    layout = KVLayout.from_config(
        described.config,
        block_size=probe_block_size(described.config, 16),
        dtype=described.dtype,
        latent=described.latent,
    )
    _check_family(described, model, layout)
    if not fuse(model, layout, described.max_model_len):
        model = load()
    kernel, names = _pack(model, described, device, choice.quantization, kernels)
    weight_bytes = model_bytes(model)
    if device.type == "cpu":
        fuse_native_layers(model, layout)
        join_native_layers(model, layout)
    if described.lora:
        add_adapters(model, layout, described.lora, kernel.kernel)
    adapter_bytes = model_bytes(model) - weight_bytes
    return LoadedModel(
        **vars(described),
        model=model,
        adapter_bytes=adapter_bytes,
        kernels=kernel,
        kernel_names=MappingProxyType({described.dtype: kernel.name, **names}),
        facts={
            "name": choice.name,
            "revision": choice.revision,
            "family": described.pretrained.model_type,
            "dtype": described.dtype,
            "quantization": quantization_of(described.config, choice.quantization),
            "parameters": num_parameters,
            "weight_bytes": weight_bytes,
            "adapter_bytes": adapter_bytes,
            "max_model_len": described.max_model_len,
            **({"longrope": True} if uses_longrope(described.pretrained) else {}),
        },
    )


def _load(
    described: ModelDescription,
    device: torch.device,
    quantization: str | None,
    make: Callable[..., torch.nn.Module],
    num_bytes: int,
) -> torch.nn.Module:
    """Load the weights, and keep the codes of layers that were saved as ``quantization`` says."""
    folder, pretrained = described.folder, described.pretrained
    with phase("loading the model", num_bytes, "bytes") as loading:
        model = make(
            *(folder, pretrained, described.dtype, device, described.max_model_len, quantization),
            show_share=loading.set_share,
        )
    return_freed_memory()
    temper_queries(model)
    page_recurrent_state(model)
    if quantization is not None and quantization in KEPT:
        with phase("finding saved codes"):
            keep_prequantized(model, folder, described.config, quantization, device.type)
    if described.latent:
        keep_latents(model)
    return model


def _check_family(described: ModelDescription, model: torch.nn.Module, layout: KVLayout) -> None:
    device = next(model.parameters()).device
    try:
        with phase("checking the model"):
            check_attention(model, layout)
            is_cuda = device.type == "cuda"
            free_bytes = torch.cuda.mem_get_info(device)[0] if is_cuda else free_host_bytes()
            check_against_eager(model, described.max_model_len, free_bytes, latent=layout.latent)
    except ModelError as error:
        key = blame(described.folder, runs_on_meta)
        more = _ON_STRIDES if "multiple of 16 bytes" in str(error) else ""
        raise ModelError(f"{described.folder}/config.json: {key}{error}{more}") from error


def _pack(
    model: torch.nn.Module,
    described: ModelDescription,
    device: torch.device,
    quantization: str | None,
    required: KernelRequirements,
) -> tuple[KernelChoice, dict[str, str]]:
    """Quantize weights, and pack them for the kernels that will read them.

    Returns:
        The kernel of the weights that are not quantized, and the names of the others by method.
    """
    dtype, names = getattr(torch, described.dtype), {}
    if device.type == "cpu":
        names = {method: kernel.name for method, kernel in pack_codes(model, dtype).items()}
        if quantization in ON_CPU:
            names[quantization] = quantize_packed(model, quantization, dtype).name
        chosen = choose_kernel(model, dtype, required)
        if chosen.kernel is not None:
            with phase("packing weights"):
                pack_linears(model, chosen.kernel, dtype)
                pack_experts(model, chosen.kernel, dtype)
        # A single tensor keeps a whole weight file mapped, so copy tensors that are not packed.
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta and not tensor.is_inference():  # merged ones are not in a file
                tensor.data = tensor.data.clone()
        return_freed_memory()
    else:
        if quantization == "fp8":
            names["fp8"] = quantize_fp8(model)
        chosen = choose_cuda_kernel(device, dtype, required)
        if chosen.kernel is not None:
            pack_linears(model, chosen.kernel, dtype)
        torch.cuda.empty_cache()  # merged and quantized weights left holes of their size
    return chosen, names


def choose_max_model_len(values: Mapping[str, Any], wanted: int | None) -> int:
    """``wanted``, or else the longest sequence that the config ``values`` allow, in tokens.

    Raises:
        ModelError: it is too short or too long, or neither is set.
    """
    allowed = max_positions(values)
    if wanted is None and allowed is None:
        raise ModelError("the model's config sets no longest sequence; give model.max_model_len")
    if wanted is not None and wanted < 2:
        raise ModelError(
            f"model.max_model_len is {wanted}; it must be 2 or more, to hold a prompt and an output"
        )
    if allowed is not None and (wanted or 0) > allowed:
        raise ModelError(
            f"model.max_model_len is {wanted}; the model's config allows at most {allowed}"
        )
    if allowed is not None and allowed < 2 and wanted is None:
        raise ModelError(
            f"the model's config.json (max_position_embeddings) allows {allowed} tokens; a prompt "
            "and an output need 2"
        )
    longest = wanted or allowed
    assert longest is not None
    return longest
