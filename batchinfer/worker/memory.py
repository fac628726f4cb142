"""Measures a device's memory, sizes the KV pool, and estimates other uses of memory."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchinfer.config import EngineConfig, parse_size
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.kv.model_config import EXPERTS_PER_TOKEN, text_config
from batchinfer.errors import DeviceError
from batchinfer.worker.cuda_graphs.graph_sizes import MAX_GRAPH_TOKENS, all_sizes
from batchinfer.worker.linear.packed_experts import PackedExperts
from batchinfer.worker.linear.packed_linear import PackedLinear
from batchinfer.worker.linear.packed_routers import RouterWeight
from batchinfer.worker.model.quantization import plain_tensors
from batchinfer.worker.prompt_logprobs import SCORED_ROWS
from batchinfer.worker.sampling.sampler import workspace_bytes

# Largest numbers of tensors that exist at the same time in a layer. Eight have the hidden width:
# residual, normed, q, k, v, rotated q and k, attended. Three have the MLP width: gate, up, and gate
# times up.
_HIDDEN_COPIES = 8
_INNER_COPIES = 3
# Peak memory of transformers' experts, for each selected expert of a token: four tensors of the
# hidden width (input, output, weighted output, and weighted output in the tokens' order); or, if
# larger, the input and four times the expert's width (gate and up in one tensor, activated gate,
# and gate times up).
_EXPERT_COPIES = 4
# Copies of the logits: the head's output and, in some families, the scaled or capped logits.
LOGITS_COPIES = 2

_BYTES_PER_GRAPH = 8 * 2**20  # estimate for a graph of a few hundred kernels
_GRAPH_SHARE = 1 / 64
_TABLE_COPIES = 2  # packed tables for the transfer, and tables unpacked to rows of a fixed length
# Number of tokens in a piece of a context, and the largest size of attention's partial results,
# which layers with the same window and shape share (`kernels/decode_plan.py`).
_PIECE_TOKENS = 512
_MAX_PIECES_BYTES = 256 * 2**20
SCAN_CHUNK = 64  # `kernels/chunk_scan.py`
_FLOAT32_BYTES = 4

_CGROUP = Path("/sys/fs/cgroup")
_CPU_SHARE_OF_FREE = 0.25
_DEFAULT_SWAP_SPACE = EngineConfig.swap_space


def activation_elements(config: Mapping[str, Any]) -> int:
    """Return the number of elements of one token's activations, without logits."""
    text = text_config(config)
    hidden = int(text.get("hidden_size") or text.get("n_embd") or 0)
    inner = _largest(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden)
    return _HIDDEN_COPIES * hidden + max(
        _INNER_COPIES * inner, _expert_elements(text, hidden, inner)
    )


def _largest(value: Any) -> int:
    """Return a config value. If the value is a list, with a number for each layer (Gemma 3n) or for
    text and images (Ernie 4.5 VL), return the largest number."""
    return int(max(value) if isinstance(value, list | tuple) else value)


def _expert_elements(text: Mapping[str, Any], hidden: int, inner: int) -> int:
    selected = next((text[name] for name in EXPERTS_PER_TOKEN if text.get(name)), 0)
    width = _largest(text.get("moe_intermediate_size") or inner)
    return _largest(selected) * max(_EXPERT_COPIES * hidden, hidden + _EXPERT_COPIES * width)


def scan_bytes(layout: KVLayout) -> int:
    """Return an upper bound on the bytes that a recurrent layer on CUDA needs for one token's
    temporary results (`kernels/chunk_gated_delta.py`, `kernels/chunk_mamba2.py`)."""
    if layout.state is None:
        return 0
    shape, size = layout.state.shape, layout.element_bytes
    each_head = 2 * SCAN_CHUNK * size + 4 * _FLOAT32_BYTES
    if shape.has_row_decays:
        each_head += shape.key_width * (3 * size + _FLOAT32_BYTES)
    return (
        shape.num_channels * size + shape.num_values * _FLOAT32_BYTES + shape.num_heads * each_head
    )


def pieces_bytes(
    layout: KVLayout, config: Mapping[str, Any], *, max_num_seqs: int, max_model_len: int
) -> int:
    """Return an upper bound on the bytes of attention's partial results in a step on CUDA. Each
    piece of a context has partial results. Layers with the same window and shape share the memory
    of partial results."""
    heads = int(text_config(config).get("num_attention_heads") or layout.num_kv_heads)
    layers = layout.attention_layers
    kinds = {(layout.windows[layout.place(layer)[0]], layout.shape(layer)) for layer in layers}
    total = 0
    for window, shape in kinds:
        reach = min(max_model_len, window) if window else max_model_len
        pieces = -(-reach // _PIECE_TOKENS) + bool(window)  # a window may start inside a piece
        partials = max_num_seqs * heads * pieces if pieces > 1 else 0
        total += min(4 * partials * (shape.value_width + 2), _MAX_PIECES_BYTES)
    return total


def graph_bytes(
    layout: KVLayout,
    config: Mapping[str, Any],
    *,
    max_num_seqs: int,
    max_graph_tokens: int,
    max_model_len: int,
) -> int:
    """Return an upper estimate of the bytes of all step graphs and their inputs. The graphs share a
    memory pool that is as large as the largest graph needs."""
    sizes = all_sizes(max_num_seqs, max_graph_tokens)
    logits = max_num_seqs * LOGITS_COPIES * int(text_config(config)["vocab_size"])
    elements = sizes[0].tokens * activation_elements(config) + logits
    blocks = len(layout.windows) * max_num_seqs * layout.blocks_for(max_model_len)
    tables = _TABLE_COPIES * 4 * blocks
    graphs = _BYTES_PER_GRAPH * len(sizes)
    pieces = pieces_bytes(layout, config, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    scans = sizes[0].tokens * scan_bytes(layout)
    return elements * layout.element_bytes + tables + graphs + pieces + scans


def max_graph_tokens(
    engine: EngineConfig, layout: KVLayout, config: Mapping[str, Any], total: int
) -> int:
    """Return the number of tokens of the largest step with a graph.

    The number of tokens is halved until the step's activations take a small share of the device's
    memory, but is at least one token per sequence. Larger steps need no graph, because the device
    runs their kernels longer than the host takes to launch them.
    """
    tokens = min(engine.max_num_batched_tokens, MAX_GRAPH_TOKENS)
    bytes_each = activation_elements(config) * layout.element_bytes
    while tokens > engine.max_num_seqs and tokens * bytes_each > total * _GRAPH_SHARE:
        tokens = max(tokens // 2, engine.max_num_seqs)
    return tokens


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device after the weights are loaded, in bytes."""

    kind: str
    free: int
    total: int
    host_free: int | None
    """Free bytes of the host, or None if unknown. If the device is a CPU, the host is the
    device."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    weight_bytes: int
    adapter_bytes: int
    pool_bytes: int
    activation_bytes: int
    """Estimate for a step of ``max_num_batched_tokens`` tokens. On CUDA, the estimate includes
    ``pieces_bytes``."""
    logits_bytes: int
    """Estimate for sampling ``max_num_seqs`` rows, or scoring ``SCORED_ROWS`` prompt tokens."""
    graph_bytes: int
    """Estimate for all step graphs; 0 on a CPU."""
    max_graph_tokens: int
    available_bytes: int
    num_host_blocks: int
    host_bytes: int
    """Size of the host's swap space. If the device is a CPU, the swap space takes no RAM before its
    first use."""

    def lines(self, quantization: str | None = None) -> list[str]:
        """Return the plan as lines of a table, for the log."""
        rows = (
            (f"weights ({quantization})" if quantization else "weights", self.weight_bytes),
            *([("adapters", self.adapter_bytes)] if self.adapter_bytes else []),
            (f"KV pool ({self.num_blocks} blocks)", self.pool_bytes),
            ("activations (at most)", self.activation_bytes),
            ("logits (at most)", self.logits_bytes),
            ("graphs (at most)", self.graph_bytes),
            ("available", self.available_bytes),
            (f"swap space (at most {self.num_host_blocks} blocks)", self.host_bytes),
        )
        width = max(len(name) for name, _ in rows)
        return [f"{name:<{width}}  {size / 2**20:>12,.1f} MiB" for name, size in rows]


def fit_memory(
    engine: EngineConfig,
    layout: KVLayout,
    config: Mapping[str, Any],
    memory: DeviceMemory,
    *,
    weight_bytes: int,
    max_model_len: int,
    adapter_bytes: int = 0,
) -> MemoryPlan:
    """Size the KV pool, and estimate other uses of the device's memory.

    The pool has ``num_kv_blocks`` blocks or ``kv_cache_memory`` bytes, if one of them is set.
    Otherwise, on a CUDA device, the engine may use the share ``gpu_memory_utilization`` of the
    memory. The pool gets the rest of this share after weights, activations, logits and graphs. On a
    CPU, the pool is as large as ``max_num_seqs`` sequences of ``max_model_len`` tokens can use, but
    takes at most a quarter of the free memory. For a model without attention layers, a CPU's pool
    is twice as large: half of it holds the sequences' states, and half holds snapshots.

    Raises:
        DeviceError: the pool does not fit, or cannot hold one block and a recurrent state. The
            message states the sizes and the key to change.
    """
    free, total = memory.free, memory.total
    sizes = {"max_num_seqs": engine.max_num_seqs, "max_model_len": max_model_len}
    elements = engine.max_num_batched_tokens * activation_elements(config)
    activations = elements * layout.element_bytes
    rows = max(engine.max_num_seqs, min(SCORED_ROWS, engine.max_num_batched_tokens))
    vocab_size = int(text_config(config)["vocab_size"])
    logits = rows * vocab_size * layout.element_bytes * LOGITS_COPIES
    logits += workspace_bytes(rows, vocab_size, memory.kind)
    graphs = graph_tokens = 0
    if memory.kind == "cuda":
        graph_tokens = max_graph_tokens(engine, layout, config, total)
        graphs = graph_bytes(layout, config, max_graph_tokens=graph_tokens, **sizes)
        activations += pieces_bytes(layout, config, **sizes)  # also needed without graphs
        activations += engine.max_num_batched_tokens * scan_bytes(layout)
        room = int(total * engine.gpu_memory_utilization) - (total - free)
        room -= activations + logits + graphs
        key = "engine.gpu_memory_utilization"
        default = room // layout.bytes_per_block
    else:
        room, key = free, "engine.kv_cache_memory"
        num_new = min(engine.max_num_batched_tokens, max_model_len)
        usable = engine.max_num_seqs * layout.slots_for(max_model_len, num_new)
        usable *= 1 if layout.windows else 2
        default = min(usable, int(free * _CPU_SHARE_OF_FREE) // layout.bytes_per_block)
    num_blocks = default
    if engine.num_kv_blocks is not None:
        num_blocks = engine.num_kv_blocks
    elif engine.kv_cache_memory is not None:
        pool_bytes = parse_size(engine.kv_cache_memory, "engine.kv_cache_memory")
        num_blocks = pool_bytes // layout.bytes_per_block
    pool_bytes = num_blocks * layout.bytes_per_block
    least = layout.slots_per_state + bool(layout.windows)
    is_sized = engine.num_kv_blocks is None and engine.kv_cache_memory is not None
    if num_blocks < least and is_sized:
        parts = [f"a block of {engine.block_size} tokens"] if layout.windows else []
        parts += ["a sequence's recurrent state"] if layout.state is not None else []
        raise DeviceError(
            f"engine.kv_cache_memory is {engine.kv_cache_memory}; set it to at least "
            f"{_size(least * layout.bytes_per_block)}, the size of {' and '.join(parts)}"
        )
    if num_blocks < 1 or pool_bytes > room:
        raise DeviceError(
            f"a KV pool of {max(num_blocks, 1)} blocks takes "
            f"{max(num_blocks, 1) * layout.bytes_per_block / 2**20:,.1f} MiB, "
            f"but the device has only {max(room, 0) / 2**20:,.1f} MiB left after "
            f"weights of {weight_bytes / 2**20:,.1f} MiB",
            hint=_hint(engine, key),
        )
    host_blocks = _host_blocks(engine, layout, memory, pool_bytes)
    return MemoryPlan(
        num_blocks=num_blocks,
        weight_bytes=weight_bytes,
        adapter_bytes=adapter_bytes,
        pool_bytes=pool_bytes,
        activation_bytes=activations,
        logits_bytes=logits,
        graph_bytes=graphs,
        max_graph_tokens=graph_tokens,
        available_bytes=free + weight_bytes + adapter_bytes,
        num_host_blocks=host_blocks,
        host_bytes=host_blocks * layout.bytes_per_block,
    )


def _hint(engine: EngineConfig, default_key: str) -> str:
    if engine.num_kv_blocks is not None:
        return "lower engine.num_kv_blocks"
    if engine.kv_cache_memory is not None:
        return "lower engine.kv_cache_memory to less than the free memory"
    return (
        f"raise {default_key}, lower engine.max_num_batched_tokens or engine.max_num_seqs, "
        "or use a smaller model"
    )


def _host_blocks(
    engine: EngineConfig, layout: KVLayout, memory: DeviceMemory, pool_bytes: int
) -> int:
    """Return the number of blocks that fit into ``swap_space``. The default swap space is limited
    to a share of the host's free memory. Models with sliding windows have no swap space, because
    swapping their blocks is not yet supported."""
    if any(layout.windows):
        return 0
    wanted_bytes = engine.swap_bytes
    if memory.host_free is not None:
        free = memory.host_free - (pool_bytes if memory.kind == "cpu" else 0)
        if engine.swap_space == _DEFAULT_SWAP_SPACE:
            wanted_bytes = min(wanted_bytes, int(free * _CPU_SHARE_OF_FREE))
        if wanted_bytes > free:
            raise DeviceError(
                f"engine.swap_space is {engine.swap_space}, but the host has only "
                f"{_size(free)} free",
                hint="lower engine.swap_space; 0 disables it",
            )
    least = max(layout.slots_per_state, 1) * layout.bytes_per_block
    if engine.preemption == "swap" and wanted_bytes < least:
        what = "a block" if layout.state is None else "a sequence's recurrent state"
        raise DeviceError(
            f"engine.swap_space is smaller than {what}; set it to at least {_size(least)}"
        )
    return wanted_bytes // layout.bytes_per_block


def _size(num_bytes: int) -> str:
    """Return a size in the notation of job files, rounded up."""
    unit, name = (2**20, "MiB") if num_bytes >= 2**20 else (2**10, "KiB")
    return f"{-(-num_bytes // unit)}{name}"


def model_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters, buffers and packed weights. Tied weights count
    once."""
    members = (*model.parameters(), *model.buffers())
    tensors = {t.data_ptr(): t.nbytes for member in members for t in plain_tensors(member)}
    kinds = PackedLinear | PackedExperts
    packed = (module.nbytes for module in model.modules() if isinstance(module, kinds))
    weights = (getattr(module, "weight", None) for module in model.modules())
    routers = (weight.all_bytes for weight in weights if isinstance(weight, RouterWeight))
    return sum(tensors.values()) + sum(packed) + sum(routers)


def device_memory(device: torch.device, loaded_bytes: int) -> DeviceMemory:
    free = free_host_bytes()
    if device.type == "cuda":
        return DeviceMemory("cuda", *torch.cuda.mem_get_info(device), free)
    return DeviceMemory("cpu", free, free + loaded_bytes, free)


def free_host_bytes() -> int:
    """Return how many bytes of memory this process may still allocate.

    The result is the host's free memory, or less if the process's control group or address space
    (``ulimit -v``) is limited. Files in the page cache count as free, because the kernel drops them
    when memory is needed.
    """
    import psutil  # imported late, because tests of GPU kernels run without psutil

    free = int(psutil.virtual_memory().available)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free = min(free, max(0, limit - int(psutil.Process().memory_info().vms)))
    try:
        group_limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])
    except (OSError, ValueError, KeyError):
        return free
    return free if group_limit == "max" else max(0, min(free, int(group_limit) - used + cached))


def return_freed_memory() -> None:
    """Return freed memory to the operating system, if the C library can (glibc).

    glibc reserves freed memory for the thread that freed it, so other threads cannot use this
    memory. After several threads had packed a dequantized model of 0.2 billion parameters, the
    reserved memory was twice as large as the model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
