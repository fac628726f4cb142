"""Puts together an engine that computes nothing, from a model's config and tokenizer alone.

transformers reads both, and imports torch where it finds one; no weights are read and no device is
looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.builders.context import EngineContext, context_fields, encoder_fields
from batchinfer.builders.device import choose_device, describe
from batchinfer.builders.tokenizer import make_tokenizer
from batchinfer.config import EngineConfig, ModelConfig, sized_for
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.simulate.dry_run import (
    DryEncoder,
    DryRunner,
    make_dry_encoder,
    make_dry_engine,
)
from batchinfer.engine.simulate.model_cost import ModelCost, encoder_cost
from batchinfer.engine.simulate.roofline import DEVICES, Device
from batchinfer.errors import DeviceError, UsageError
from batchinfer.worker.encoder.description import describe_encoder, is_run_as_encoder
from batchinfer.worker.free_memory import free_host_bytes
from batchinfer.worker.loader import describe_model
from batchinfer.worker.memory import DeviceMemory, fit_memory
from batchinfer.worker.model.quantization import quantization_of


@dataclass(frozen=True, kw_only=True)
class SimulatedEngine(EngineContext):
    """A simulated engine in the place of a real one: its runner computes nothing."""

    runner: DryRunner | DryEncoder
    num_host_blocks: int
    simulated_share: float
    """Of the pool's blocks: more than sequences can fill are not simulated."""


def build_dry_engine(
    model: ModelConfig, engine: EngineConfig, device: Device, *, end_after: int | None = None
) -> SimulatedEngine:
    """Make the simulated engine for a model on a device.

    Weights are taken to be as many as the model's family has by its config. With ``dtype: auto``
    they are taken to be saved as the config says, or else in float32.

    Args:
        device: where; a CPU has the memory that is free on this machine.
        end_after: samples end by choice at so many tokens, where ``END_TOKEN`` ends them.

    Raises:
        ModelError: the config or the tokenizer cannot be read, or the model cannot be run.
        DeviceError: the model or the pool does not fit the device.
    """
    engine = sized_for("cuda" if device.is_gpu else "cpu", engine)
    if is_run_as_encoder(model):
        return _build_dry_encoder(model, engine, device)
    device_type = "cuda" if device.is_gpu else "cpu"
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
    weight_bytes = cost.weight_bytes + adapter_bytes
    memory = fit_memory(
        engine,
        layout,
        config,
        _memory_beside_weights(device, weight_bytes),
        weight_bytes=cost.weight_bytes,
        max_model_len=longest,
        adapter_bytes=adapter_bytes,
    )
    num_blocks = min(memory.num_blocks, _most_blocks(engine, layout, longest))
    dry, runner = make_dry_engine(
        engine,
        cost,
        device,
        num_blocks=num_blocks,
        num_host_blocks=memory.num_host_blocks,
        max_model_len=longest,
        end_after=end_after,
        windows=layout.windows,
    )
    return SimulatedEngine(
        engine=dry,
        tokenizer=make_tokenizer(model),
        **context_fields(described, layout, memory),
        device=device.name,
        model_facts={
            "name": model.name,
            "dtype": described.dtype,
            "quantization": quantization_of(config, model.quantization),
            "weight_bytes": cost.weight_bytes,
            "adapter_bytes": adapter_bytes,
        },
        kernels={},
        device_bytes=lambda: weight_bytes + memory.pool_bytes,
        num_host_blocks=memory.num_host_blocks,
        simulated_share=num_blocks / memory.num_blocks,
        runner=runner,
    )


def _build_dry_encoder(model: ModelConfig, engine: EngineConfig, device: Device) -> SimulatedEngine:
    """Make the simulated engine for a model that reads texts whole; there is no KV pool."""
    described = describe_encoder(model)
    cost = encoder_cost(described.config, described.dtype)
    dry, runner = make_dry_encoder(engine, cost, device, max_model_len=described.max_model_len)
    return SimulatedEngine(
        engine=dry,
        tokenizer=make_tokenizer(model),
        **encoder_fields(described),
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
        num_host_blocks=0,
        simulated_share=1.0,
        runner=runner,
    )


def _most_blocks(engine: EngineConfig, layout: KVLayout, max_model_len: int) -> int:
    """Blocks that running sequences can fill, and as many for cached ones.

    More would change nothing but the time a step takes to count them: a small model has millions
    of blocks on a large device.
    """
    num_new = min(engine.max_num_batched_tokens, max_model_len)
    return 2 * engine.max_num_seqs * layout.slots_for(max_model_len, num_new)


def device_of(engine: EngineConfig) -> Device:
    """The simulated device for ``engine.device`` on this machine.

    Raises:
        DeviceError: CUDA is asked for and not there.
        UsageError: the machine's device is not one whose speed is known.
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
    raise UsageError(f"nothing is known of the speed of this machine's {name}", hint=hint)


def _memory_beside_weights(device: Device, weight_bytes: int) -> DeviceMemory:
    if device.memory_bytes is None:
        free = free_host_bytes()
        return DeviceMemory("cpu", free - weight_bytes, free, free - weight_bytes)
    total = device.memory_bytes
    return DeviceMemory("cuda", total - device.reserved_bytes - weight_bytes, total, None)
