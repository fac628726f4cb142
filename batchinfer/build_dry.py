"""Puts together an engine that computes nothing, from a model's config and tokenizer alone.

transformers reads both, and imports torch where it finds one; no weights are read and no device is
looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.build import EngineContext, ModelChoice, choose_device, describe, make_tokenizer
from batchinfer.config import EngineConfig, sized_for
from batchinfer.engine.kv.layout import KVLayout, text_config
from batchinfer.engine.simulate.dry_run import DryRunner, make_dry_engine
from batchinfer.engine.simulate.roofline import DEVICES, Device, ModelCost
from batchinfer.errors import DeviceError, UsageError
from batchinfer.worker.loader import choose_max_model_len
from batchinfer.worker.lora.checkpoint import read_adapters
from batchinfer.worker.memory import DeviceMemory, fit_memory, free_host_bytes
from batchinfer.worker.model.checkpoint import CONFIG_FILES, resolve_folder
from batchinfer.worker.model.config import load_config
from batchinfer.worker.model.quantization import check_quantization
from batchinfer.worker.model.tokenizer import eos_token_ids
from batchinfer.worker.model.weights import choose_dtype


@dataclass(frozen=True)
class SimulatedEngine(EngineContext):
    """What ``build_engine`` would return, over a runner that computes nothing."""

    runner: DryRunner
    num_host_blocks: int


def build_dry_engine(
    model: ModelChoice, engine: EngineConfig, device: Device, *, end_after: int | None = None
) -> SimulatedEngine:
    """Make the engine that would run a model on a device.

    Weights are taken to be as many as the model's family has by its config. With ``dtype: auto``
    they are taken to be saved as the config says, or else in float32.

    Args:
        model: which one.
        engine: how it would use the device.
        device: where; a CPU has the memory that is free on this machine.
        end_after: samples end by choice at so many tokens, where ``END_TOKEN`` ends them.

    Raises:
        ModelError: the config or the tokenizer cannot be read, or the model cannot be run.
        DeviceError: the model or the pool does not fit the device.
    """
    engine = sized_for("cuda" if device.is_gpu else "cpu", engine)
    folder = resolve_folder(model.name, model.revision, CONFIG_FILES)
    loaded_config = load_config(folder)
    config = loaded_config.to_dict()
    check_quantization(config, model.quantization, "cuda" if device.is_gpu else "cpu")
    adapters = read_adapters(model.adapters, loaded_config)
    longest = choose_max_model_len(config, model.max_model_len)
    dtype = choose_dtype(model.dtype, config, {})
    layout = KVLayout.from_config(
        config,
        block_size=engine.block_size,
        dtype=dtype,
        kv_cache_dtype=engine.kv_cache_dtype,
        max_model_len=longest,
    )
    cost = ModelCost.from_config(config, dtype, engine.kv_cache_dtype, model.quantization)
    adapter_bytes = sum(adapter.nbytes(cost.element_bytes) for adapter in adapters)
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
    dry, runner = make_dry_engine(
        engine,
        cost,
        device,
        num_blocks=min(memory.num_blocks, _most_blocks(engine, layout, longest)),
        num_host_blocks=memory.num_host_blocks,
        max_model_len=longest,
        end_after=end_after,
        windows=layout.windows,
    )
    vocab_size = int(text_config(config)["vocab_size"])
    return SimulatedEngine(
        engine=dry,
        tokenizer=make_tokenizer(model),
        eos_token_ids=eos_token_ids(folder, config, vocab_size),
        max_model_len=longest,
        vocab_size=vocab_size,
        adapters={adapter.name: number for number, adapter in enumerate(adapters, start=1)},
        block_size=engine.block_size,
        num_blocks=memory.num_blocks,
        bytes_per_block=layout.bytes_per_block,
        device=device.name,
        model_facts={
            "name": model.name,
            "dtype": dtype,
            "weight_bytes": cost.weight_bytes,
            "adapter_bytes": adapter_bytes,
        },
        kernels={},
        device_bytes=lambda: weight_bytes + memory.pool_bytes,
        num_host_blocks=memory.num_host_blocks,
        runner=runner,
    )


def _most_blocks(engine: EngineConfig, layout: KVLayout, max_model_len: int) -> int:
    """Blocks that running sequences can fill, and as many for what they leave behind.

    More would change nothing but the time a step takes to count them: a small model has millions
    of blocks on a large device.
    """
    num_new = min(engine.max_num_batched_tokens, max_model_len)
    return 2 * engine.max_num_seqs * layout.slots_for(max_model_len, num_new)


def device_of(engine: EngineConfig) -> Device:
    """The device that ``engine.device`` means on this machine.

    Raises:
        DeviceError: CUDA is asked for and not there.
        UsageError: the machine's device is not one whose speed is known.
    """
    hint = f"plan for another device: --device {', '.join(DEVICES)}"
    try:
        found = choose_device(engine.device)
    except DeviceError as error:
        raise DeviceError(str(error).splitlines()[0], hint=hint) from None
    if found.type == "cpu":
        return DEVICES["cpu"]
    name = describe(found)
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
