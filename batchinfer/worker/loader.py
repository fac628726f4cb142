"""Loads one of transformers' causal language models, and prepares it for paged attention.

Packages that replace parts of the model: ``attention``, ``recurrent`` (recurrent layers),
``fusion`` (modules and layers that can be fused) and ``linear`` (linear layers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedConfig

from batchinfer.config import ModelConfig
from batchinfer.console.phases import phase
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.kv.model_config import max_positions, text_config
from batchinfer.errors import ModelError
from batchinfer.worker.attention.latent import check_latents, keep_latents
from batchinfer.worker.attention.temperature import temper_queries
from batchinfer.worker.family_check import check_against_eager, check_attention
from batchinfer.worker.fusion.activations import replace_activations
from batchinfer.worker.fusion.fuse import fuse, fused_line
from batchinfer.worker.fusion.native_delta_layers import fuse_native_delta_layers
from batchinfer.worker.fusion.native_layers import fuse_native_layers, join_native_layers
from batchinfer.worker.linear.fp8_linear import quantize_fp8
from batchinfer.worker.linear.int4_linear import quantize_int4
from batchinfer.worker.linear.kernel_choice import (
    KernelChoice,
    KernelRequirements,
    choose_cuda_kernel,
    choose_kernel,
)
from batchinfer.worker.linear.packed_experts import pack_experts
from batchinfer.worker.linear.packed_linear import pack_linears, pack_prequantized, quantize_packed
from batchinfer.worker.linear.packed_routers import pack_routers
from batchinfer.worker.linear.prequantized_loader import (
    KEPT,
    keep_prequantized,
    quantized_weights,
)
from batchinfer.worker.linear.separate_experts import LaterExperts, check_packed
from batchinfer.worker.linear_kernels import ON_CPU
from batchinfer.worker.lora.adapter_checkpoint import Adapter, read_adapters
from batchinfer.worker.lora.lora_layers import add_adapters
from batchinfer.worker.memory import free_host_bytes, model_bytes, return_freed_memory
from batchinfer.worker.model.check_weight_files import check_weights, file_bytes
from batchinfer.worker.model.config import load_config
from batchinfer.worker.model.meta_model import (
    blame,
    build_on_meta,
    check_buildable,
    runs_on_meta,
)
from batchinfer.worker.model.model_folder import ALL_FILES, CONFIG_FILES, resolve_folder
from batchinfer.worker.model.quantization import check_quantization, quantization_of
from batchinfer.worker.model.tokenizer import check_vocabulary, eos_token_ids
from batchinfer.worker.model.weights import choose_dtype, load_weights, uses_longrope
from batchinfer.worker.recurrent.patch_layers import page_recurrent_state
from batchinfer.worker.self_test import probe_block_size

_ANY_KERNELS = KernelRequirements()
_EXPERT_STRIDES = (
    " (torch multiplies all experts of a layer at once, which needs experts whose "
    "hidden size and intermediate size are multiples of 16 bytes in the model's "
    "dtype)"
)


@dataclass(frozen=True)
class ModelDescription:
    """A model's description, read from its folder without loading weights."""

    folder: Path
    pretrained: PreTrainedConfig
    config: Mapping[str, Any]
    max_model_len: int
    """Longest sequence in tokens, prompt plus output."""
    eos_token_ids: frozenset[int]
    dtype: str
    lora: tuple[Adapter, ...]
    latent: bool
    """True if attention caches latents instead of expanded keys and values."""

    @property
    def vocab_size(self) -> int:
        return int(text_config(self.config)["vocab_size"])

    @property
    def adapters(self) -> dict[str, int]:
        """Numbers of the adapters, from 1, keyed by adapter name."""
        return {adapter.name: number for number, adapter in enumerate(self.lora, start=1)}

    def layout(self, block_size: int, kv_cache_dtype: str = "auto") -> KVLayout:
        """Return the layout of the model's KV in blocks of ``block_size`` tokens.

        Raises:
            ModelError: the model has chunked attention, and the chunk length is not a multiple of
                ``block_size``.
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
    model: torch.nn.Module
    adapter_bytes: int
    kernels: KernelChoice
    """The kernel of the linear layers that are not quantized."""
    kernel_names: Mapping[str, str]
    """Names of the linear layers' kernels, keyed by the weights' dtype or quantization."""
    facts: Mapping[str, Any]
    """Values for summary.json: name, revision, family, parameters, bytes."""
    notes: tuple[str, ...]
    """Lines about fused modules, for the log."""


def describe_model(
    model: ModelConfig,
    device_type: str,
    *,
    latent: bool = False,
    weights_too: bool = False,
) -> ModelDescription:
    """Read and check a model folder (or hub id), without its weights. No code from the folder is
    run.

    Args:
        device_type: device that the model will run on, ``cpu`` or ``cuda``.
        latent: value of ``engine.latent_cache``.
        weights_too: fetch the weight files and check their headers. If the config has no dtype, the
            default is then the files' dtype instead of float32.

    Raises:
        ModelError: the model cannot be run.
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
        modules = (target.module for adapter in lora for target in adapter.targets)
        check_latents(values, device_type, modules)
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
    """Raise ModelError if the model caches latents and the adapter changes the projection of
    latents to keys and values."""
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
    """Check a model folder (or hub id), load its weights and run a few tokens.

    No code from the folder is run.

    Args:
        latent: value of ``engine.latent_cache``.
        random_weights: use random weights and ignore the folder's weight files.

    Raises:
        ModelError: the model cannot be run.
        DeviceError: the weights do not fit into the device's memory, or no kernel meets
            ``kernels``.
    """
    description = describe_model(choice, device.type, latent=latent, weights_too=not random_weights)
    num_bytes = None if random_weights else file_bytes(description.folder)
    check_buildable(description.folder, description.pretrained, num_bytes)
    load = partial(_load, description, device, choice.quantization, num_bytes)
    model = load()
    num_parameters = sum(p.numel() for p in model.parameters())
    layout = KVLayout.from_config(
        description.config,
        block_size=probe_block_size(description.config, 16),
        dtype=description.dtype,
        latent=description.latent,
    )
    _check_family(description, model, layout)
    notes: list[str] = []
    if not fuse(model, layout, description.max_model_len, notes.append):
        notes.append("no modules are fused, because the model's logits would change")
        model = load()
    if device.type == "cuda":
        notes.append(fused_line(model))
    kernel, names = _pack(model, description, device, choice.quantization, kernels)
    weight_bytes = model_bytes(model)
    if device.type == "cpu":
        fuse_native_layers(model, layout)
        fuse_native_delta_layers(model, layout)
        join_native_layers(model, layout)
        replace_activations(model, getattr(torch, description.dtype))
    if description.lora:
        add_adapters(model, layout, description.lora, kernel.kernel)
    adapter_bytes = model_bytes(model) - weight_bytes
    return LoadedModel(
        **vars(description),
        model=model,
        adapter_bytes=adapter_bytes,
        kernels=kernel,
        kernel_names=MappingProxyType({description.dtype: kernel.name, **names}),
        facts={
            "name": choice.name,
            "revision": choice.revision,
            "family": description.pretrained.model_type,
            "dtype": description.dtype,
            "quantization": quantization_of(description.config, choice.quantization),
            "parameters": num_parameters,
            "weight_bytes": weight_bytes,
            "adapter_bytes": adapter_bytes,
            "max_model_len": description.max_model_len,
            **({"longrope": True} if uses_longrope(description.pretrained) else {}),
        },
        notes=tuple(notes),
    )


def _load(
    description: ModelDescription,
    device: torch.device,
    quantization: str | None,
    num_bytes: int | None,
) -> torch.nn.Module:
    """Load weight files of ``num_bytes`` bytes, or make random weights if ``num_bytes`` is None.
    For layers that were saved with the requested quantization, the saved codes are kept. If weights
    will be quantized, most experts that are saved in separate tensors are loaded later
    (``LaterExperts``)."""
    folder = description.folder
    read = partial(
        load_weights,
        *(folder, description.pretrained, description.dtype, device, description.max_model_len),
        quantization=quantization,
        random=num_bytes is None,
    )
    later = None
    if quantization in ON_CPU and device.type == "cpu" and num_bytes is not None:
        later = _later_experts(description)
    with phase("loading the model", num_bytes or 0, "bytes") as loading:
        model = read(show_share=loading.set_share, later=later)
        if later is not None:
            later.put_back()
            if not later.names_fit(model):
                model = read(show_share=loading.set_share)
    return_freed_memory()
    temper_queries(model)
    page_recurrent_state(model)
    if quantization is not None and quantization in KEPT:
        with phase("finding quantized weights"):
            keep_prequantized(model, folder, description.config, quantization, device.type)
    if description.latent:
        keep_latents(model)
    return model


def _later_experts(description: ModelDescription) -> LaterExperts | None:
    saved = quantized_weights(description.folder, description.config)
    if not saved:
        return None
    dtype = getattr(torch, description.dtype)
    later = LaterExperts(build_on_meta(description.pretrained, dtype=dtype), saved)
    return later if later else None


def _check_family(description: ModelDescription, model: torch.nn.Module, layout: KVLayout) -> None:
    device = next(model.parameters()).device
    try:
        with phase("checking the model"):
            check_attention(model, layout)
            is_cuda = device.type == "cuda"
            free_bytes = torch.cuda.mem_get_info(device)[0] if is_cuda else free_host_bytes()
            check_against_eager(model, description.max_model_len, free_bytes, latent=layout.latent)
    except ModelError as error:
        key = blame(description.folder, runs_on_meta)
        more = _EXPERT_STRIDES if "multiple of 16 bytes" in str(error) else ""
        raise ModelError(f"{description.folder}/config.json: {key}{error}{more}") from error


def _pack(
    model: torch.nn.Module,
    description: ModelDescription,
    device: torch.device,
    quantization: str | None,
    required: KernelRequirements,
) -> tuple[KernelChoice, dict[str, str]]:
    """Quantize weights, and pack them for their kernels. Return the kernel of unquantized weights,
    and the names of the quantization methods' kernels, keyed by method."""
    dtype, names = getattr(torch, description.dtype), {}
    if device.type == "cpu":
        names = {method: kernel.name for method, kernel in pack_prequantized(model, dtype).items()}
        if quantization in ON_CPU:
            with phase("packing weights"):
                names[quantization] = quantize_packed(model, quantization, dtype).name
            check_packed(model)
        chosen = choose_kernel(model, dtype, required)
        if chosen.kernel is not None:
            with phase("packing weights"):
                pack_linears(model, chosen.kernel, dtype)
                pack_experts(model, chosen.kernel, dtype)
                pack_routers(model, chosen.kernel, dtype)
        # Copy the tensors that were not packed. A single tensor from a weight file would keep the
        # whole file mapped into memory.
        for tensor in (*model.parameters(), *model.buffers()):
            # Merged weights (inference tensors) are not mapped from a file.
            if not tensor.is_meta and not tensor.is_inference():
                tensor.data = tensor.data.clone()
        return_freed_memory()
    else:
        if quantization == "fp8":
            names["fp8"] = quantize_fp8(model)
        elif quantization == "int4":
            names["int4"] = quantize_int4(model, batch_invariant=required.deterministic)
        chosen = choose_cuda_kernel(device, dtype, required)
        if chosen.kernel is not None:
            pack_linears(model, chosen.kernel, dtype)
        torch.cuda.empty_cache()  # merging and quantizing left unused memory
    return chosen, names


def choose_max_model_len(values: Mapping[str, Any], wanted: int | None) -> int:
    """Return ``wanted``, or else the longest sequence in tokens that the config ``values`` allow.

    Raises:
        ModelError: the length is too small or too large, or neither ``wanted`` nor the config sets
            a length.
    """
    allowed = max_positions(values)
    if wanted is None:
        if allowed is None:
            raise ModelError("the model's config sets no maximum length; set model.max_model_len")
        if allowed < 2:
            raise ModelError(
                "the model's config.json (max_position_embeddings) allows "
                f"{allowed} tokens, but a prompt and an output need at least 2"
            )
        return allowed
    if wanted < 2:
        raise ModelError(
            f"model.max_model_len is {wanted}; it must be 2 or more, because a "
            "prompt and an output need at least one token each"
        )
    if allowed is not None and wanted > allowed:
        raise ModelError(
            f"model.max_model_len is {wanted}, but the model's config allows at most {allowed}"
        )
    return wanted
