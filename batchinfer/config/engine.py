"""Settings of the engine, with their defaults and ranges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from batchinfer.config.settings_base import Record, coerce_fields, parse_size

QUANTIZATIONS = ("int8", "int4", "fp8", "int8_weight_only", "int4_weight_only")
"""Values of ``model.quantization``: batchinfer's own formats, and torchao's."""


@dataclass(frozen=True)
class EngineConfig(Record):
    """Settings of the engine, which stay the same during a run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the first CUDA device, or the CPU if there is none."""
    block_size: int = 16
    """Number of tokens in a KV block."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory for weights, KV pool and activations together."""
    kv_cache_memory: str | int | float | None = None
    """Size of the KV pool, like 40GiB (a bare number is GiB). Overrides gpu_memory_utilization."""
    num_kv_blocks: int | None = None
    """Number of blocks in the KV pool. Overrides gpu_memory_utilization and kv_cache_memory."""
    max_num_seqs: int = 1024
    """Largest number of sequences that run at the same time."""
    max_num_batched_tokens: int = 8192
    """Largest number of tokens to compute in one step. On a CPU, steps have at most 1,024 tokens,
    or max_num_seqs if that is more, because larger steps overflow the CPU's caches."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prefixes that rows have in common."""
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    """How a preempted sequence gets its KV back. recompute: compute its tokens again. swap: copy
    its KV to host memory and back. auto: the faster of the two."""
    swap_space: str | int | float = "4GiB"
    """Host memory for swapped blocks; 0: none. On a CPU, the default is also limited to a quarter
    of the free memory."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """auto: the model's dtype. fp8 (the same as fp8_e4m3): one byte per number, without scales, so
    the pool has twice as many blocks as with 16 bits."""
    order: Literal["prefix", "input"] = "prefix"
    """Order in which rows run. The output is always in input order."""
    order_window: int = 65536
    """Approximate number of rows in a window. The rows of a window are planned together. A window
    consists of whole parts of the output and has at most 64 million prompt tokens. With order:
    prefix, the rows of a window are sorted."""
    deterministic: bool = False
    """Make the bits of a row's results independent of the other rows in a batch. On a CUDA device,
    deterministic: true uses slower kernels and refuses some models. On a CPU, the results of most
    dense models are independent even without this setting if cpu_kernels is own and latent_cache is
    false."""
    latent_cache: bool = False
    """For latent attention (DeepSeek V2 and V3, GLM 4.7-Flash, ...), cache one latent per token
    instead of the keys and values of every head. For DeepSeek V3, latents take 1/71 of the memory
    per token. However, the bits of a row's results may depend on the other rows in a batch."""
    num_threads: int | None = None
    """Number of threads that compute on a CPU. null: OMP_NUM_THREADS if it is set, otherwise one
    per core that this process may use. Fewer threads compute while other processes use the
    cores."""
    cpu_kernels: Literal["auto", "own", "onednn", "torch"] = "auto"
    """Kernels for linear layers on a CPU. auto: the fastest for the model's shapes, measured once.
    own: batchinfer's kernels, which give a row the same bits in any batch. onednn: oneDNN with
    packed weights. torch: torch's linear layers. A resumed job uses the kernels of its first run if
    the machine has them."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        most = {"block_size": 1024, "max_num_seqs": 2**16, "max_num_batched_tokens": 2**24}
        for name, bound in (most | {"order_window": 2**31 - 1}).items():
            self._require(name, 1 <= getattr(self, name) <= bound, f"from 1 to {bound}")
        if self.latent_cache and self.deterministic:
            raise ValueError("set latent_cache or deterministic, not both")
        share = self.gpu_memory_utilization
        self._require("gpu_memory_utilization", 0.0 < share <= 1.0, "more than 0 and at most 1")
        threads = self.num_threads
        self._require("num_threads", threads is None or 1 <= threads <= 4096, "1 to 4096")
        blocks = self.num_kv_blocks
        self._require("num_kv_blocks", blocks is None or 1 <= blocks < 2**31, "from 1 to 2**31 - 1")
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory, "kv_cache_memory")
        self._check_swap()
        if self.deterministic and self.cpu_kernels not in ("auto", "own"):
            raise ValueError(
                "deterministic: true needs kernels that compute each row by itself, which "
                f"cpu_kernels: {self.cpu_kernels} does not guarantee; set own or auto"
            )

    @property
    def swap_bytes(self) -> int:
        """Bytes of host memory for swapped blocks; 0 if swapping is disabled."""
        if self.preemption == "recompute" or not self.enable_prefix_caching:
            return 0
        return parse_size(self.swap_space, "swap_space")

    def _check_swap(self) -> None:
        space = parse_size(self.swap_space, "swap_space")
        if self.preemption == "swap" and not self.enable_prefix_caching:
            raise ValueError(
                "preemption: swap needs the prefix cache to find swapped blocks "
                "again; set enable_prefix_caching: true or preemption: recompute"
            )
        if self.preemption == "swap" and space == 0:
            raise ValueError(
                "preemption: swap needs host memory; set swap_space, or preemption: auto"
            )


_CPU_STEP_TOKENS = 1024
"""Maximum number of tokens in a step on a CPU. Larger steps overflow the CPU's caches, and jobs
with such steps took 4 to 10 % longer."""


def sized_for(device_type: str, engine: EngineConfig) -> EngineConfig:
    """Return the settings with the best step size for a type of device, ``cpu`` or ``cuda``."""
    if device_type != "cpu":
        return engine
    tokens = max(_CPU_STEP_TOKENS, engine.max_num_seqs)
    return replace(engine, max_num_batched_tokens=min(engine.max_num_batched_tokens, tokens))
