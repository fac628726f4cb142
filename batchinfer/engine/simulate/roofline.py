"""Roofline model of a step's time: at best, and on a well-built engine. No torch.

A step's operators run one after another; each takes the longer of its arithmetic at the device's
peak and its memory traffic at the device's bandwidth (Williams, Waterman & Patterson 2009,
https://doi.org/10.1145/1498765.1498785). Counted are the layers' matrices, the head, attention of
decodes and of prompt chunks, writing KV, one fused pass over the activations between matrices, and
logits written and read once.

Left out: what samplers other than greedy add, loading the model, copies of blocks, rows read from
or written to disk, caches (a shared prefix is read from memory for every sequence), attention
windows (every layer reads the whole context), and how unevenly a router spreads tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from batchinfer.engine.kv.layout import Config, KVLayout, text_config
from batchinfer.engine.simulate.weight_bytes import (
    INT8_BYTES,
    OWN_ON_CPU,
    expert_bytes,
    matrix_bytes,
)
from batchinfer.engine.step import Step

_GIB = 2**30
_LOGIT_BYTES = 4
# Families whose MLP is two matrices; the others gate theirs, which takes a third.
_PLAIN_MLP = frozenset(
    ["falcon", "gpt2", "gpt_bigcode", "gpt_neox", "nemotron", "opt", "phi", "starcoder2"]
)


@dataclass(frozen=True, slots=True)
class Device:
    """Limits of a device: measured, or its data sheet's numbers cut to what is reached."""

    name: str
    bandwidth: float
    """Bytes per second, reads and writes together."""
    flops: Mapping[int, float]
    """Multiplications and additions per second in matrix products, by bytes of an element."""
    memory_bytes: int | None
    """Whole memory as the driver reports it; None: the memory of the machine at hand."""
    reserved_bytes: int = 0
    """Taken before a model is loaded: the driver's context and libraries."""
    kernel_s: float = 0.0
    """Gap, ramp and tail of one kernel."""
    host_bandwidth: float = 5e9
    """Bytes per second of copies between it and the host, one way at a time: of a CPU's pool
    measured, else about eight tenths of what PCIe of its generation has."""

    @property
    def is_gpu(self) -> bool:
        """Whether it has memory of its own, and computes while the host goes on."""
        return self.memory_bytes is not None


def _gpu(
    name: str, bandwidth: float, half: float, single: float, gib: float, host: float
) -> Device:
    memory, reserved = int(gib * _GIB), int(0.6 * _GIB)
    return Device(name, bandwidth, {2: half, 4: single}, memory, reserved, 1.5e-6, host)


DEVICES: Mapping[str, Device] = {
    "h200": _gpu("NVIDIA H200", 4.3e12, 790e12, 60e12, 139.8, 50e9),  # bandwidth and half: measured
    "h100": _gpu("NVIDIA H100 SXM", 3.0e12, 700e12, 60e12, 79.1, 50e9),
    "a100-80g": _gpu("NVIDIA A100 80 GB", 1.83e12, 280e12, 17.5e12, 79.1, 25e9),
    "l40s": _gpu("NVIDIA L40S", 0.78e12, 290e12, 70e12, 44.4, 25e9),
    # Two cores with AVX-512, measured.
    "cpu": Device("cpu", 32e9, {2: 419e9, 4: 198e9}, None, kernel_s=5e-6),
}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of the device's limits that is reached, by operator."""

    gemm_bandwidth: float = 1.0
    gemm_flops: float = 1.0
    attention_bandwidth: float = 1.0
    attention_flops: float = 1.0
    activation_bandwidth: float = 1.0
    kernels_per_layer: int = 0
    kernels_beside: int = 0
    """Kernels of a step outside the layers: embedding, norm, head, sampling."""


PERFECT = Efficiency()
"""The bound: no engine that runs one operator after another is faster."""
WELL_BUILT = Efficiency(0.8, 0.8, 0.8, 0.5, 0.75, kernels_per_layer=10, kernels_beside=12)
"""An estimate: TensorRT-LLM's published throughputs on H200 are within -10 to +7 % of it."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Costs of a token, in numbers of one model; P counts parameters.

    Where layers differ in the shape of their KV, a layer's numbers are the mean of all.
    """

    layers: int
    hidden: int
    heads: int
    attention_width: float
    """Elements of a head's key and value together."""
    attention_parameters: float
    """P of a layer's attention matrices."""
    mlp_parameters: int
    """P of a layer's MLP, or of one of its experts."""
    experts: int
    """Experts per layer; 0 where the MLP is dense."""
    experts_per_token: int
    head_parameters: int
    tied: bool
    """Whether the embedding is the head's matrix."""
    activations: float
    """Elements read and written per token and layer between the matrices."""
    element_bytes: int
    matrix_bytes: float
    """Bytes of a parameter of the layers' matrices, experts apart: fewer where quantised."""
    expert_bytes: float
    """Bytes of a parameter of the experts."""
    head_bytes: float
    """Bytes of a parameter of the head."""
    kv_bytes: int
    """Bytes of a token's KV, all layers."""

    @classmethod
    def from_config(
        cls,
        config: Config,
        dtype: str,
        kv_cache_dtype: str = "auto",
        quantization: str | None = None,
        *,
        latent: bool = False,
        on_cpu: bool = False,
    ) -> ModelCost:
        """Read the sizes from a model's config (``config.to_dict()`` or its config.json).

        Args:
            dtype: of the weights, by name.
            kv_cache_dtype: as ``KVLayout.from_config``.
            quantization: ``model.quantization``.
            latent: as ``KVLayout.from_config``.
            on_cpu: whether the model is run on one.

        Raises:
            ValueError: as ``KVLayout.from_config``.
        """
        text = text_config(config)
        layout = KVLayout.from_config(
            config,
            block_size=1,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            latent=latent,
        )
        hidden = _first(text, "hidden_size", "n_embd", "d_model")
        heads = _first(text, "num_attention_heads", "n_head", "num_heads", "n_heads")
        experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts")
        inner = _first(text, "intermediate_size", "n_inner") or 4 * hidden
        if experts:
            inner = _first(text, "moe_intermediate_size") or inner
        shapes = [layout.shape(layer) for layer in range(layout.num_layers)]
        width = _mean(shape.key_width + shape.value_width for shape in shapes)
        queries = heads * _mean(shape.key_width for shape in shapes)
        keys = _mean(layout.stored_elements)
        return cls(
            layers=layout.num_layers,
            hidden=hidden,
            heads=heads,
            attention_width=width,
            attention_parameters=_latent_parameters(text, hidden, heads)
            or hidden * (heads * width + keys),
            mlp_parameters=(2 if text.get("model_type") in _PLAIN_MLP else 3) * hidden * inner,
            experts=experts,
            experts_per_token=_first(text, "num_experts_per_tok", "num_experts_per_token"),
            head_parameters=int(text["vocab_size"]) * hidden,
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            # Two norms with residuals; q, k and v written, rotated and attended; the gated MLP.
            activations=10 * hidden + 6 * queries + 3 * keys + 6 * inner,
            element_bytes=layout.element_bytes,
            matrix_bytes=matrix_bytes(config, quantization, layout.element_bytes, on_cpu=on_cpu),
            expert_bytes=expert_bytes(config, quantization, layout.element_bytes, on_cpu=on_cpu),
            head_bytes=INT8_BYTES if quantization in OWN_ON_CPU else float(layout.element_bytes),
            kv_bytes=layout.bytes_per_token,
        )

    @property
    def weight_bytes(self) -> int:
        """All parameters; norms and biases are left out."""
        each = self.element_bytes if self.tied else self.element_bytes + self.head_bytes
        heads = self.head_parameters * each
        return round(self.layers * self._layer_bytes(self.experts) + heads)

    @property
    def active_parameters(self) -> float:
        """P of all layers that one token is multiplied with."""
        used = self.experts_per_token if self.experts else 1
        return self.layers * (self.attention_parameters + self.mlp_parameters * used)

    def weights_read(self, tokens: int) -> float:
        """Bytes of the layers' matrices that a step of ``tokens`` tokens reads.

        Experts are taken to be chosen evenly and independently.
        """
        touched = 0.0
        if self.experts:
            untouched = (1 - self.experts_per_token / self.experts) ** tokens
            touched = self.experts * (1 - untouched)
        return self.layers * self._layer_bytes(touched)

    def _layer_bytes(self, experts: float) -> float:
        """Bytes of a layer's matrices, so many experts of it."""
        if self.experts:
            mlp = self.mlp_parameters * experts * self.expert_bytes
        else:
            mlp = self.mlp_parameters * self.matrix_bytes
        return self.attention_parameters * self.matrix_bytes + mlp


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a step, in numbers."""

    tokens: int
    logits_rows: int
    decode_context: int
    """Sum of the context lengths of sequences that compute one token."""
    chunks: int = 0
    """Sequences that compute several."""
    chunk_context: int = 0
    """Sum of their context lengths."""
    chunk_pairs: int = 0
    """(query, key) pairs of their attention."""

    @classmethod
    def of(cls, step: Step) -> StepWork:
        """Work of an engine's step."""
        new = np.diff(step.query_starts).astype(np.int64)
        context = step.context_lens.astype(np.int64)
        one, scored = new == 1, step.scored
        pairs = new * (context - new) + new * (new + 1) // 2
        return cls(
            tokens=step.num_tokens,
            logits_rows=len(step.logits_indices) + (0 if scored is None else len(scored.rows)),
            decode_context=int(context[one].sum()),
            chunks=int((~one).sum()),
            chunk_context=int(context[~one].sum()),
            chunk_pairs=int(pairs[~one].sum()),
        )


def step_seconds(
    model: ModelCost, device: Device, work: StepWork, efficiency: Efficiency = PERFECT
) -> float:
    """Seconds of one step."""
    flops, bandwidth = device.flops[model.element_bytes], device.bandwidth
    e = efficiency

    def gemm(parameters: float, rows: int, read: float) -> float:
        compute = 2 * parameters * rows / (flops * e.gemm_flops)
        return max(compute, read / (bandwidth * e.gemm_bandwidth)) if rows else 0.0

    def attention(pairs: int, context: int) -> float:
        compute = 2 * model.layers * model.heads * model.attention_width * pairs
        read = context * model.kv_bytes / (bandwidth * e.attention_bandwidth)
        return max(compute / (flops * e.attention_flops), read)

    head_bytes = model.head_parameters * model.head_bytes
    vocab = model.head_parameters // model.hidden
    passed = (
        work.tokens * model.kv_bytes
        + work.tokens * model.layers * model.activations * model.element_bytes
        + work.logits_rows * vocab * _LOGIT_BYTES
    )
    kernels = model.layers * e.kernels_per_layer + e.kernels_beside
    return (
        gemm(model.active_parameters, work.tokens, model.weights_read(work.tokens))
        + gemm(model.head_parameters, work.logits_rows, head_bytes)
        + attention(work.decode_context, work.decode_context)
        + attention(work.chunk_pairs, work.chunk_context)
        + passed / (bandwidth * e.activation_bandwidth)
        + kernels * device.kernel_s
    )


def _mean(numbers: Iterable[float]) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def _latent_parameters(config: Config, hidden: int, heads: int) -> int:
    """P of a layer's latent attention (DeepSeek-V2, arXiv:2405.04434); 0: it has none."""
    rank, query_rank = _first(config, "kv_lora_rank"), _first(config, "q_lora_rank")
    if not rank:
        return 0
    rotary, value = _first(config, "qk_rope_head_dim"), _first(config, "v_head_dim")
    key = _first(config, "qk_nope_head_dim")
    queries = heads * (key + rotary)
    query = query_rank * (hidden + queries) if query_rank else hidden * queries
    latent = hidden * (rank + rotary) + rank * heads * (key + value)
    return query + latent + heads * value * hidden


def _first(config: Config, *names: str) -> int:
    """The first of these numbers that the config has, of one for each layer the mean; 0 if none."""
    found = next((config[name] for name in names if config.get(name)), 0)
    return int(_mean(found) if isinstance(found, list | tuple) else found)
