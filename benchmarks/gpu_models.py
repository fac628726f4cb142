"""Models with real shapes and random weights, created on the device, and engines that run them."""

from __future__ import annotations

from collections import Counter
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
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.fusion.fused_modules import FusedAttention, FusedDecoderLayer, FusedGatedMLP
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.memory import DeviceMemory, fit_memory, model_bytes
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.sampler import Sampler

MAX_MODEL_LEN = 4096
_WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": (
        "qwen3",
        {
            "num_hidden_layers": 28,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "Llama-3.1-8B": (
        "llama",
        {**_WIDE, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256},
    ),
    "Qwen3-8B": (
        "qwen3",
        {**_WIDE, "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936},
    ),
    "tiny": (
        "qwen3",
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "vocab_size": 512,
        },
    ),
}


def shape_of(name: str) -> Shape:
    """Return a model's shape for the roofline."""
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
    """Create a transformers model; weights depend only on name, device and dtype."""
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
    """Return the device's memory, without host memory for swapping."""
    if device.type == "cpu":
        return DeviceMemory("cpu", 2**32, 2**32, None)
    return DeviceMemory("cuda", *torch.cuda.mem_get_info(device), None)


@dataclass(frozen=True)
class Ready:
    """An engine with a fused model and captured CUDA graphs."""

    engine: Engine
    graphs: StepGraphs | None
    num_blocks: int
    vocab: int
    fused_layers: int
    layers: int

    @property
    def is_complete(self) -> bool:
        """True if all layers are fused, and all graphs captured."""
        graphs = self.graphs is None or self.graphs.num_captured == len(self.graphs.sizes)
        return graphs and self.fused_layers == self.layers


def ready(name: str, device: torch.device, dtype: torch.dtype, settings: EngineConfig) -> Ready:
    """Create a model and an engine as ``batchinfer`` does, but without files."""
    model = random_model(name, device, dtype)
    config = model.config.to_dict()
    dtype_name = str(dtype).removeprefix("torch.")
    layout = KVLayout.from_config(config, block_size=settings.block_size, dtype=dtype_name)
    if not fuse(model, layout, MAX_MODEL_LEN, print):
        print("no modules are fused, because the model's logits would change")
        model = random_model(name, device, dtype)
    kinds = Counter(map(type, model.modules()))
    fused = min(kinds[kind] for kind in (FusedAttention, FusedGatedMLP, FusedDecoderLayer))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    weight_bytes = model_bytes(model)
    memory = fit_memory(
        settings,
        layout,
        config,
        _free_memory(device),
        weight_bytes=weight_bytes,
        max_model_len=MAX_MODEL_LEN,
    )
    cache = KVCache(layout, memory.num_blocks, device, dtype)
    graphs = None
    if device.type == "cuda":
        graphs = StepGraphs(
            model,
            cache,
            max_num_seqs=settings.max_num_seqs,
            max_graph_tokens=memory.max_graph_tokens,
            max_model_len=MAX_MODEL_LEN,
        )
        graphs.capture_all(print)
    runner = ModelRunner(model, cache, Sampler(), graphs)
    pool = BlockPool(memory.num_blocks, settings.block_size, enable_prefix_caching=True)
    table = SequenceTable(settings.max_num_seqs, MAX_MODEL_LEN, settings.block_size)
    scheduler = Scheduler(pool, table, settings.max_num_batched_tokens)
    engine = Engine(scheduler, runner, runs_ahead=device.type == "cuda")
    return Ready(
        engine,
        graphs,
        memory.num_blocks,
        vocab=config["vocab_size"],
        fused_layers=fused,
        layers=config["num_hidden_layers"],
    )
