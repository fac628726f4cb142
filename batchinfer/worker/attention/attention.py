"""The attention function that transformers' model classes call: paged attention over the KV pool.

The function is registered with transformers' ``AttentionInterface`` without a mask function, so
transformers makes no mask. Models do not pass block tables and slot mappings. The attention
function reads both from the forward context, which is set while the model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from batchinfer.engine.step import Step
from batchinfer.kernels.cpu import compiled_library
from batchinfer.worker.adapter_batch import StepAdapters
from batchinfer.worker.attention.chunked import CapturedChunkedAttention, ChunkedAttention
from batchinfer.worker.attention.cuda import (
    BatchInvariantAttention,
    CudaAttention,
    LatentCudaAttention,
)
from batchinfer.worker.attention.latent import LatentProjection
from batchinfer.worker.attention.native_cpu import NativeAttention, instructions_for
from batchinfer.worker.attention.temperature import QueryTemperature
from batchinfer.worker.attention.torch_cpu import CpuAttention
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear_kernels import LinearKernel

ATTENTION_NAME = "batchinfer_paged"
ATTENTION = "attention"
_CAUSAL_IN_FULL_ATTENTION = frozenset({"gemma4_text"})
"""Language models in which the tokens of an image attend in both directions only in sliding-window
layers. Full-attention layers are causal even within images."""

# Arguments that a model may pass and that would change the result, but that paged attention does
# not support.
_UNSUPPORTED = ("position_bias", "indices", "block_indices", "relative_attention_bias")


class UnsupportedAttentionError(Exception):
    """A model's attention cannot be computed as paged attention."""


class AttentionBackend(Protocol):
    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the step, and its arrays on the device, for later calls to ``attend``."""
        ...

    def attend(self, layer: int, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
        """Compute a layer's attention for queries [T, Hq, Dk] over its cached keys and values.
        Return [T, Hq, Dv]."""
        ...


class CapturedBackend(AttentionBackend, Protocol):
    """Computes attention on a CUDA device, and can be captured in a graph."""

    def begin_captured(
        self,
        tensors: Mapping[str, torch.Tensor],
        max_context_len: int,
        *,
        shares: bool,
        max_chunks: int,
    ) -> None:
        """Begin a step like ``CudaAttention.begin_captured``."""
        ...


def make_backend(cache: KVCache, like: LinearKernel | None = None) -> AttentionBackend:
    """Make the attention backend for the pool's device. On a CPU, the backend uses C kernels if
    they can be compiled.

    Args:
        like: kernel of the model's linear layers (see ``NativeAttention``). On a CUDA device,
            attention is batch-invariant if that kernel is.
    """
    if cache.pool.is_cuda:
        return make_cuda_backend(cache, like)

    def make() -> CpuAttention | NativeAttention:
        return NativeAttention(cache, like) if cache.is_native else CpuAttention(cache)

    return ChunkedAttention(cache, make(), make()) if cache.layout.chunks else make()


def make_cuda_backend(cache: KVCache, like: LinearKernel | None) -> CapturedBackend:
    if cache.layout.latent:
        return LatentCudaAttention(cache)
    make = BatchInvariantAttention if _is_batch_invariant(like) else CudaAttention
    if cache.layout.chunks:
        return CapturedChunkedAttention(cache, make(cache), make(cache))
    return make(cache)


def _is_batch_invariant(kernel: LinearKernel | None) -> bool:
    return kernel is not None and kernel.is_batch_invariant


@dataclass(frozen=True)
class AttentionKernel:
    """The name of an attention kernel. For a torch kernel, also the reason why no C kernel is
    used."""

    name: str
    why: str = ""

    @classmethod
    def of(cls, cache: KVCache, like: LinearKernel | None = None) -> AttentionKernel:
        """Return the kernel of the backend that ``make_backend`` chooses."""
        pool = cache.pool
        if pool.is_cuda:
            return cls("Triton in a fixed order" if _is_batch_invariant(like) else "Triton")
        if cache.is_native:
            return cls(f"own {instructions_for(pool.dtype, like)}")
        if compiled_library.why_not():
            return cls("torch (no C kernels)", compiled_library.why_not())
        kind = "latents" if cache.layout.latent else "a cache"
        dtype = str(pool.dtype).removeprefix("torch.")
        return cls("torch", f"there is no C kernel for {kind} of {dtype}")

    def line(self, before: Mapping[str, str]) -> str:
        """Return a line for the log of a run.

        Args:
            before: names of the kernels that earlier runs of the job used; the attention kernel's
                key is ``ATTENTION``.
        """
        line = f"attention uses {self.name}{self.why and f': {self.why}'}"
        earlier = before.get(ATTENTION, self.name)
        if earlier != self.name:
            line += f"; earlier runs used {earlier}, so bits may differ"
        return line


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Data of the current forward pass that the attention layers need."""

    cache: KVCache
    backend: AttentionBackend
    tensors: Mapping[str, torch.Tensor]
    adapters: StepAdapters | None = None
    has_layer_hooks: bool = False
    """True if forward hooks change the outputs of individual layers, so layers must run one by
    one."""

    def slot_mapping(self, layer: int) -> torch.Tensor:
        """Return where a layer stores each token's keys and values, as ``slot * block_size +
        offset``, [T] int64."""
        group = self.cache.group(layer)
        if group == 0:
            return self.tensors["slot_mapping"]
        return self.tensors["other_slots"][group - 1]


_context: ContextVar[ForwardContext] = ContextVar("forward_context")
current_context = _context.get


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Set the context for attention layers that run inside the ``with`` block."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, T, Dk]
    key: torch.Tensor,  # [1, Hkv, T, Dk]
    value: torch.Tensor,  # [1, Hkv, T, Dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention for transformers. Return the output [1, T, Hq, Dv], and None for
    the attention weights."""
    _check_call(module, query, attention_mask, kwargs)
    context, layer = current_context(), int(module.layer_idx)  # type: ignore[arg-type]
    num_layers = context.cache.layout.num_layers
    if layer >= num_layers:
        raise UnsupportedAttentionError(
            f"layer {layer} calls attention, but the config has only {num_layers} layers"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    up = getattr(module, "kv_b_proj", None)
    latent = up if isinstance(up, LatentProjection) else None
    temperature = getattr(module, "query_temperature", None)
    if isinstance(temperature, QueryTemperature):
        query = temperature.of(query, context.tensors["positions"])
    queries = query[0].transpose(0, 1) if latent is None else latent.queries(query[0])
    key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if context.cache.layout.owner(layer) == layer:
        context.cache.write(layer, key, value, context.slot_mapping(layer))
    window = int(kwargs.get("sliding_window") or 0)
    out = context.backend.attend(
        layer,
        queries,
        AttentionVariant(
            scale=float(scaling),
            sliding_window=window,
            softcap=float(kwargs.get("softcap") or 0.0),
            sinks=kwargs.get("s_aux"),
            ignores_query_ends=not window and _family_of(module) in _CAUSAL_IN_FULL_ATTENTION,
            prompt_window=context.cache.layout.prompt_window(layer),
        ),
    )
    return (out if latent is None else latent.values(out))[None], None


def _family_of(module: torch.nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "model_type", None)


def register() -> None:
    """Register ``attn_implementation="batchinfer_paged"`` with transformers."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def _check_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: Mapping[str, Any],
) -> None:
    if getattr(module, "layer_idx", None) is None:
        raise UnsupportedAttentionError(f"{type(module).__name__} has no layer_idx")
    if attention_mask is not None:
        raise UnsupportedAttentionError(f"{type(module).__name__} builds its own attention mask")
    if query.shape[0] != 1:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} calls attention with a batch of {query.shape[0]} rows, not 1"
        )
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedAttentionError(f"{type(module).__name__} is not causal")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(
                f"{type(module).__name__} passes {name} to attention, which is not supported"
            )
