"""Builds a simulated engine, which computes nothing, from a model's config and tokenizer.

The simulated engine reads no weights and uses no device.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from batchinfer.builders.context import EngineContext, pool_fields
from batchinfer.builders.device import choose_device, describe
from batchinfer.builders.tokenizer import make_tokenizer
from batchinfer.config import EngineConfig, ModelConfig, sized_for
from batchinfer.engine.simulate.dry_run import (
    DryEncoder,
    DryRunner,
    make_dry_encoder,
    make_dry_engine,
)
from batchinfer.engine.simulate.model_cost import ModelCost, encoder_cost
from batchinfer.engine.simulate.roofline import DEVICES, Device, TowerCost
from batchinfer.errors import DeviceError, UsageError
from batchinfer.worker.encoder.encoder_config import describe_encoder, is_run_as_encoder
from batchinfer.worker.loader import describe_model
from batchinfer.worker.memory import DeviceMemory, fit_memory, free_host_bytes
from batchinfer.worker.model.quantization import quantization_of
from batchinfer.worker.vision.image_embeddings import EMBEDDING_BYTES
from batchinfer.worker.vision.support import image_support
from batchinfer.worker.vision.tower import attention_size, vision_tower_bytes


@dataclass(frozen=True, kw_only=True)
class SimulatedEngine(EngineContext):
    runner: DryRunner | DryEncoder
    num_host_blocks: int = 0
    simulated_share: float = 1.0
    """Fraction of the KV cache's blocks that are simulated."""
    tower: TowerCost | None = None
    """Cost of the vision tower; None if rows have no images."""


def build_dry_engine(
    model: ModelConfig,
    engine: EngineConfig,
    device: Device,
    *,
    end_after: int | None = None,
    with_images: bool = False,
) -> SimulatedEngine:
    """Build the simulated engine for a model on a device.

    The size of the weights is computed from the model's config. With ``dtype: auto``, the weights
    have the config's dtype, or else float32.

    Args:
        device: device to simulate. A simulated CPU has as much memory as this machine has free.
        end_after: number of output tokens after which samples draw ``END_TOKEN``; None: never.
            ``END_TOKEN`` ends a sample only if the request's ``eos_token_ids`` contain it.
        with_images: True to leave memory for the vision tower of a vision-language model.

    Raises:
        ModelError: the config or the tokenizer cannot be read, or the model cannot be run.
        DeviceError: the model or the KV cache does not fit the device.
    """
    device_type = "cuda" if device.is_gpu else "cpu"
    engine = sized_for(device_type, engine)
    if is_run_as_encoder(model):
        return _build_dry_encoder(model, engine, device)
    described = describe_model(model, device_type, latent=engine.latent_cache)
    config, longest = described.config, described.max_model_len
    layout = described.layout(engine.block_size, engine.kv_cache_dtype)
    cost = ModelCost.from_config(
        config,
        described.dtype,
        engine.kv_cache_dtype,
        model.quantization,
        latent=described.latent,
        on_cpu=not device.is_gpu,
    )
    adapter_bytes = sum(adapter.nbytes(cost.element_bytes) for adapter in described.lora)
    tower_bytes = vision_tower_bytes(described.pretrained, described.dtype) if with_images else 0
    model_bytes = cost.weight_bytes + tower_bytes
    weight_bytes = model_bytes + adapter_bytes
    memory = fit_memory(
        engine,
        layout,
        config,
        _memory_without(device, weight_bytes + (EMBEDDING_BYTES if tower_bytes else 0)),
        weight_bytes=model_bytes,
        max_model_len=longest,
        adapter_bytes=adapter_bytes,
    )
    # Simulate at most twice the blocks that sequences can fill, which leaves room for cached
    # blocks. A small model has millions of blocks on a large device, and simulating all of them
    # would only take longer.
    num_new = min(engine.max_num_batched_tokens, longest)
    most_blocks = 2 * engine.max_num_seqs * layout.slots_for(longest, num_new)
    num_blocks = min(memory.num_blocks, most_blocks)
    dry, runner = make_dry_engine(
        engine,
        cost,
        device,
        num_blocks=num_blocks,
        num_host_blocks=memory.num_host_blocks,
        max_model_len=longest,
        end_after=end_after,
        windows=layout.windows,
        slots_per_state=layout.slots_per_state,
    )
    return SimulatedEngine(
        engine=dry,
        tokenizer=make_tokenizer(model),
        **pool_fields(described, layout, memory),
        device=device.name,
        model_facts={
            "name": model.name,
            "dtype": described.dtype,
            "quantization": quantization_of(config, model.quantization),
            "weight_bytes": model_bytes,
            "adapter_bytes": adapter_bytes,
        },
        kernels={},
        device_bytes=lambda: weight_bytes + memory.pool_bytes,
        num_host_blocks=memory.num_host_blocks,
        simulated_share=num_blocks / memory.num_blocks,
        runner=runner,
        images=image_support(described.folder, described.pretrained),
        tower=_tower_cost(described.pretrained, tower_bytes, cost, device),
    )


def _tower_cost(
    config: PreTrainedConfig, tower_bytes: int, cost: ModelCost, device: Device
) -> TowerCost | None:
    if not tower_bytes:
        return None
    width, most_context = attention_size(config)
    parameters = tower_bytes // cost.element_bytes
    return TowerCost(parameters, device.flops[cost.element_bytes], width, most_context)


def _build_dry_encoder(model: ModelConfig, engine: EngineConfig, device: Device) -> SimulatedEngine:
    described = describe_encoder(model)
    cost = encoder_cost(described.config, described.dtype)
    dry, runner = make_dry_encoder(engine, cost, device, max_model_len=described.max_model_len)
    return SimulatedEngine(
        engine=dry,
        tokenizer=make_tokenizer(model),
        max_model_len=described.max_model_len,
        vocab_size=described.vocab_size,
        device=device.name,
        model_facts={
            "name": model.name,
            "dtype": described.dtype,
            "quantization": None,
            "weight_bytes": cost.weight_bytes,
            "adapter_bytes": 0,
        },
        kernels={},
        device_bytes=lambda: cost.weight_bytes,
        runner=runner,
    )


def device_of(engine: EngineConfig) -> Device:
    """Return the simulated device for ``engine.device`` on this machine.

    Raises:
        DeviceError: ``engine.device`` is cuda, and there is no CUDA device.
        UsageError: the speed of the machine's device is not known.
    """
    hint = f"plan for another device: --device {', '.join(DEVICES)}"
    try:
        torch_device = choose_device(engine.device)
    except DeviceError as error:
        raise DeviceError(error.message, hint=hint) from None
    if torch_device.type == "cpu":
        return DEVICES["cpu"]
    name = describe(torch_device)
    for key, device in DEVICES.items():
        if key.partition("-")[0].upper() in name.upper():
            return device
    raise UsageError(f"the speed of this machine's {name} is not known", hint=hint)


def _memory_without(device: Device, used_bytes: int) -> DeviceMemory:
    if device.memory_bytes is None:
        free = free_host_bytes()
        return DeviceMemory("cpu", free - used_bytes, free, free - used_bytes)
    total = device.memory_bytes
    return DeviceMemory("cuda", total - device.reserved_bytes - used_bytes, total, None)
