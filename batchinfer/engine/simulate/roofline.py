"""Roofline model of a step's time, at the device's limits and on a well-built engine.

A step's operators run one after another. An operator takes either the time of its arithmetic at the
device's peak or the time of its memory traffic at the device's bandwidth, whichever is longer
(Williams, Waterman & Patterson 2009, https://doi.org/10.1145/1498765.1498785). The model counts the
layers' matrices, the head, attention of decodes and of prompt chunks, KV writes, one fused pass
over the activations between matrices, and one write and one read of the logits.

The model excludes sampling other than greedy, loading the model, copies of blocks, reading and
writing rows, caches (a shared prefix is read from memory for every sequence), attention windows
(every layer reads the whole context), or uneven routing to experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.engine.step import Step

_GIB = 2**30
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Device:
    """Limits of a device: either measured, or data sheet values lowered to what programs reach."""

    name: str
    bandwidth: float
    """Bytes per second, reads and writes together."""
    flops: Mapping[int, float]
    """Multiplications plus additions per second in a GEMM, keyed by bytes per element."""
    memory_bytes: int | None
    """Total memory that the driver reports; None: this machine's memory."""
    reserved_bytes: int = 0
    """Memory that the driver's context and libraries take before the model is loaded."""
    kernel_s: float = 0.0
    """Overhead of one kernel, in seconds: launch gap, ramp-up and tail."""
    host_bandwidth: float = 5e9
    """Bytes per second of copies to or from the host: measured for a CPU's pool; for GPUs, about
    80 % of the nominal rate of the PCIe link."""

    @property
    def is_gpu(self) -> bool:
        """True if the device has separate memory and computes while the host continues."""
        return self.memory_bytes is not None


def _gpu(
    name: str, bandwidth: float, half: float, single: float, gib: float, host: float
) -> Device:
    memory, reserved = int(gib * _GIB), int(0.6 * _GIB)
    return Device(name, bandwidth, {2: half, 4: single}, memory, reserved, 1.5e-6, host)


DEVICES: Mapping[str, Device] = {
    # The bandwidth and the 16-bit rate were measured.
    "h200": _gpu("NVIDIA H200", 4.3e12, 790e12, 60e12, 139.8, 50e9),
    "h100": _gpu("NVIDIA H100 SXM", 3.0e12, 700e12, 60e12, 79.1, 50e9),
    "a100-80g": _gpu("NVIDIA A100 80 GB", 1.83e12, 280e12, 17.5e12, 79.1, 25e9),
    "l40s": _gpu("NVIDIA L40S", 0.78e12, 290e12, 70e12, 44.4, 25e9),
    # Measured on two cores with AVX-512.
    "cpu": Device("cpu", 32e9, {2: 419e9, 4: 198e9}, None, kernel_s=5e-6),
}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of the device's limits that each type of operator reaches: 1.0 = the limit."""

    gemm_bandwidth: float = 1.0
    gemm_flops: float = 1.0
    attention_bandwidth: float = 1.0
    attention_flops: float = 1.0
    activation_bandwidth: float = 1.0
    kernels_per_layer: int = 0
    other_kernels: int = 0
    """Kernels per step outside the layers: embedding, norm, head, sampling."""


PERFECT = Efficiency()
"""Efficiency that gives a lower bound on the time of any engine that runs operators one by one."""
WELL_BUILT = Efficiency(0.8, 0.8, 0.8, 0.5, 0.75, kernels_per_layer=10, other_kernels=12)
"""Estimated efficiency of a good engine. TensorRT-LLM's published throughputs on an H200 differ
from this estimate by -10 to +7 %."""


@dataclass(frozen=True, slots=True)
class TowerCost:
    """Cost of encoding images with a vision tower.

    The estimate multiplies every patch by all parameters. The estimate is too high for parts
    that read fewer tokens, such as the projector.
    """

    parameters: int
    flops: float
    """``Device.flops`` for the tower's dtype."""
    attention_width: int = 0
    """Sum over the layers with full attention of their heads times the width of a head."""
    most_context: float = math.inf
    """Maximum number of patches to which a patch attends: the patches of a tile, if the tower
    divides images into tiles."""

    def seconds(self, patches: Mapping[float, int], efficiency: Efficiency = PERFECT) -> float:
        """Return the seconds to encode images; ``patches`` counts images per number of patches."""
        total = sum(size * count for size, count in patches.items())
        pairs = sum(size * min(size, self.most_context) * count for size, count in patches.items())
        gemms = 2 * self.parameters * total / efficiency.gemm_flops
        attention = 4 * self.attention_width * pairs / efficiency.attention_flops
        return (gemms + attention) / self.flops


@dataclass(frozen=True, slots=True)
class StepWork:
    tokens: int
    logits_rows: int
    decode_context: int
    """Sum of the context lengths of sequences that compute one token."""
    chunks: int = 0
    """Number of chunks: sequences that compute several tokens."""
    chunk_context: int = 0
    """Sum of the context lengths of chunks."""
    chunk_pairs: int = 0
    """(query, key) pairs in the attention of chunks."""
    sequences: int = 0
    """Number of sequences. Each has a recurrent state if the model has any."""

    @classmethod
    def of(cls, step: Step) -> StepWork:
        new = np.diff(step.query_starts).astype(np.int64)
        context = step.context_lens.astype(np.int64)
        decodes, scored = new == 1, step.scored
        pairs = new * (context - new) + new * (new + 1) // 2
        return cls(
            tokens=step.num_tokens,
            logits_rows=len(step.logits_indices) + (0 if scored is None else len(scored.rows)),
            decode_context=int(context[decodes].sum()),
            chunks=int((~decodes).sum()),
            chunk_context=int(context[~decodes].sum()),
            chunk_pairs=int(pairs[~decodes].sum()),
            sequences=step.num_sequences,
        )


def step_seconds(
    model: ModelCost, device: Device, work: StepWork, efficiency: Efficiency = PERFECT
) -> float:
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
        + 2 * work.sequences * model.state_bytes
        + work.tokens * model.layers * model.activations * model.element_bytes
        + work.logits_rows * vocab * _LOGIT_BYTES
    )
    kernels = model.layers * e.kernels_per_layer + e.other_kernels
    return (
        gemm(model.active_parameters, work.tokens, model.weights_read(work.tokens))
        + gemm(model.head_parameters, work.logits_rows, head_bytes)
        + attention(work.decode_context, work.decode_context)
        + attention(work.chunk_pairs, work.chunk_context)
        + passed / (bandwidth * e.activation_bandwidth)
        + kernels * device.kernel_s
    )
