"""One attention function for transformers' own model classes, over the paged KV pool.

Registered with transformers' ``AttentionInterface`` and without a mask function, so that
transformers makes no mask. What a call cannot be told by the model (block tables, slots) it finds
in the forward context that is opened around the model's call.
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
from batchinfer.worker.adapter_batch import StepAdapters
from batchinfer.worker.attention.chunked import CapturedChunkedAttention, ChunkedAttention
from batchinfer.worker.attention.fixed_order import FixedOrderAttention
from batchinfer.worker.attention.latent import LatentProjection
from batchinfer.worker.attention.latent_cuda import LatentCudaAttention
from batchinfer.worker.attention.native_cpu import NativeAttention
from batchinfer.worker.attention.temperature import QueryTemperature
from batchinfer.worker.attention.torch_cpu import CpuAttention
from batchinfer.worker.attention.triton import CudaAttention
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear_kernels import LinearKernel

ATTENTION_NAME = "batchinfer_paged"

# Arguments that would change the result, and that this function does not implement.
_UNSUPPORTED = ("position_bias", "indices", "block_indices", "relative_attention_bias")


class UnsupportedAttentionError(Exception):
    """A model asks its attention for something that is not paged attention."""


class AttentionBackend(Protocol):
    """What runs a layer's attention on one kind of device."""

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the step that the following calls belong to, and its arrays on the device."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [T, Hq, Dk]
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """Attend over what is in the cache; returns [T, Hq, Dv]."""
        ...


class CapturedBackend(AttentionBackend, Protocol):
    """What runs a layer's attention on a CUDA device, and can be captured in a graph."""

    def begin_captured(
        self,
        tensors: Mapping[str, torch.Tensor],
        max_context_len: int,
        *,
        shares: bool,
        max_chunks: int,
    ) -> None:
        """Begin a step from the device's arrays alone (see ``CudaAttention``)."""
        ...


def make_backend(cache: KVCache, like: LinearKernel | None = None) -> AttentionBackend:
    """Make the attention backend for the pool's device; on a CPU the C kernels where they can be
    built.

    Args:
        like: what multiplies by the model's weights (see ``NativeAttention``); attention on a CUDA
            device keeps a row's bits where that does.
    """
    if cache.pool.is_cuda:
        return make_cuda_backend(cache, like)

    def make() -> CpuAttention | NativeAttention:
        return NativeAttention(cache, like) if cache.is_native else CpuAttention(cache)

    return ChunkedAttention(cache, make(), make()) if cache.layout.chunks else make()


def make_cuda_backend(cache: KVCache, like: LinearKernel | None) -> CapturedBackend:
    """Make the attention backend for a CUDA device, with ``make_backend``'s arguments."""
    if cache.layout.latent:
        return LatentCudaAttention(cache)
    is_batch_invariant = like is not None and like.is_batch_invariant
    make = FixedOrderAttention if is_batch_invariant else CudaAttention
    if cache.layout.chunks:
        return CapturedChunkedAttention(cache, make(cache), make(cache))
    return make(cache)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Context of one forward pass for its attention layers."""

    cache: KVCache
    backend: AttentionBackend
    tensors: Mapping[str, torch.Tensor]
    """The step's ``slot_mapping`` and ``other_slots`` on the device, and what ``adapters`` need."""
    adapters: StepAdapters | None = None
    """None: the step has no rows with adapters."""

    def slot_mapping(self, layer: int) -> torch.Tensor:
        """Slots of a layer's keys and values of each token, [T] int64."""
        group = self.cache.group(layer)
        if group == 0:
            return self.tensors["slot_mapping"]
        return self.tensors["other_slots"][group - 1]


_context: ContextVar[ForwardContext] = ContextVar("forward_context")
current_context = _context.get


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Set the context that attention layers called inside use."""
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
    """Paged attention as transformers calls it in every layer; returns [1, T, Hq, Dv] and no
    weights.

    Raises:
        UnsupportedAttentionError: when the model asks for a mask, a bias or sparse attention.
    """
    _check_call(module, query, attention_mask, kwargs)
    context, layer = current_context(), int(module.layer_idx)  # type: ignore[arg-type]
    num_layers = context.cache.layout.num_layers
    if layer >= num_layers:
        raise UnsupportedAttentionError(
            f"layer {layer} attends, and by its config it has {num_layers} layers with KV"
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
    out = context.backend.attend(
        layer,
        queries,
        AttentionVariant(
            scale=float(scaling),
            sliding_window=int(kwargs.get("sliding_window") or 0),
            softcap=float(kwargs.get("softcap") or 0.0),
            sinks=kwargs.get("s_aux"),
        ),
    )
    return (out if latent is None else latent.values(out))[None], None


def register() -> None:
    """Make ``attn_implementation="batchinfer_paged"`` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def _check_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: Mapping[str, Any],
) -> None:
    if getattr(module, "layer_idx", None) is None:
        raise UnsupportedAttentionError(f"{type(module).__name__} does not know its layer")
    if attention_mask is not None:
        raise UnsupportedAttentionError(f"{type(module).__name__} makes its own attention mask")
    if query.shape[0] != 1:
        raise UnsupportedAttentionError(f"{type(module).__name__} reshapes its batch")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedAttentionError(f"{type(module).__name__} is not causal")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"{type(module).__name__} passes {name}")
