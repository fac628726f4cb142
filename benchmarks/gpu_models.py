"""Models with real shapes and random weights, created on the device, and engines that run them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from roofline import Shape
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.worker.attention.attention import ATTENTION_NAME, register
from batchinfer.worker.cuda_graphs.step_graphs import StepGraphs
from batchinfer.worker.fusion.fuse import fuse, fused_line
from batchinfer.worker.fusion.fused_modules import FusedAttention, FusedDecoderLayer, FusedGatedMLP
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.memory import DeviceMemory, fit_memory, model_bytes
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.sampler import Sampler

MAX_MODEL_LEN = 4096
_WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_SMALL = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 512,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": ("qwen3", {**_SMALL, "num_hidden_layers": 28}),
    "two layers of Qwen3-0.6B": ("qwen3", {**_SMALL, "num_hidden_layers": 2}),
    "Llama-3.1-8B": (
        "llama",
        {**_WIDE, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256},
    ),
    "Qwen3-8B": (
        "qwen3",
        {**_WIDE, "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936},
    ),
    "tiny": ("qwen3", _TINY),
    "tiny-llama": ("llama", _TINY),
}


def shape_of(name: str) -> Shape:
    values = _CONFIGS[name][1]
    return Shape(
        layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        heads=values["num_attention_heads"],
        kv_heads=values["num_key_value_heads"],
        width=values["head_dim"],
        inner=values["intermediate_size"],
        vocab=values["vocab_size"],
        tied=values.get("tie_word_embeddings", False),
    )


def random_model(
    name: str, device: torch.device, dtype: torch.dtype, attention: str = ATTENTION_NAME
) -> Any:
    """Create a transformers model, whose weights depend only on name, device and dtype."""
    family, values = _CONFIGS[name]
    config = CONFIG_MAPPING[family](
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
        **({"tie_word_embeddings": False} | values),
    )
    register()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    return model.to(device).eval().requires_grad_(False)


def _free_memory(device: torch.device) -> DeviceMemory:
    """Return the device's memory, with 0 bytes of host memory for swapping."""
    if device.type == "cpu":
        return DeviceMemory("cpu", 2**32, 2**32, None)
    return DeviceMemory("cuda", *torch.cuda.mem_get_info(device), None)


@dataclass(frozen=True)
class Ready:
    """An engine with a fused model and captured CUDA graphs."""

    engine: Engine
    model: Any
    cache: KVCache
    graphs: StepGraphs
    vocab: int
    fused_layers: int
    layers: int
    seconds: dict[str, float]

    @property
    def is_complete(self) -> bool:
        captured = self.graphs.num_captured == len(self.graphs.sizes)
        return captured and self.fused_layers == self.layers

    @property
    def facts(self) -> dict[str, Any]:
        """The outcome of the start, as values of a cell."""
        return {
            "ok": self.is_complete,
            "layers": self.layers,
            "fused_layers": self.fused_layers,
            "graph_sizes": len(self.graphs.sizes),
            "graphs_captured": self.graphs.num_captured,
            "num_blocks": self.cache.num_blocks,
            "pool_bytes": self.cache.nbytes,
            **{f"{part} s": seconds for part, seconds in self.seconds.items()},
        }


def ready(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    settings: EngineConfig,
    *,
    layer_major: bool = False,
) -> Ready:
    """Create a model and an engine as ``batchinfer`` does, but without files.

    On a CPU, ``ready`` needs ``interpreted()``, and each replay of a graph computes the step again.

    Args:
        layer_major: store the blocks of a layer together, instead of the layers of a block.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "model"):
        model = random_model(name, device, dtype)
    config = model.config.to_dict()
    dtype_name = str(dtype).removeprefix("torch.")
    layout = KVLayout.from_config(config, block_size=settings.block_size, dtype=dtype_name)
    with _timed(seconds, "fuse"):
        if not fuse(model, layout, MAX_MODEL_LEN, print):
            print("no modules are fused, because the model's logits would change")
            model = random_model(name, device, dtype)
    print(fused_line(model))
    kinds = Counter(map(type, model.modules()))
    fused = min(kinds[kind] for kind in (FusedAttention, FusedGatedMLP, FusedDecoderLayer))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    memory = fit_memory(
        settings,
        layout,
        config,
        _free_memory(device),
        weight_bytes=model_bytes(model),
        max_model_len=MAX_MODEL_LEN,
    )
    cache = KVCache(layout, memory.num_blocks, device, dtype, layer_major=layer_major)
    on_cuda = device.type == "cuda"
    graphs = StepGraphs(
        model,
        cache,
        max_num_seqs=settings.max_num_seqs,
        max_graph_tokens=(memory.max_graph_tokens if on_cuda else settings.max_num_batched_tokens),
        max_model_len=MAX_MODEL_LEN,
        capture=None if on_cuda else lambda run: run,
    )
    with _timed(seconds, "capture"):
        graphs.capture_all(print)
    runner = ModelRunner(model, cache, Sampler(), graphs)
    pool = BlockPool(memory.num_blocks, settings.block_size, enable_prefix_caching=True)
    table = SequenceTable(settings.max_num_seqs, MAX_MODEL_LEN, settings.block_size)
    scheduler = Scheduler(pool, table, settings.max_num_batched_tokens)
    return Ready(
        Engine(scheduler, runner, runs_ahead=True),
        model,
        cache,
        graphs,
        vocab=config["vocab_size"],
        fused_layers=fused,
        layers=config["num_hidden_layers"],
        seconds=seconds,
    )


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the time of the ``with`` block, including the work that it queues on the device."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[part] = time.perf_counter() - began
