"""Measures the time of a workload's linear layers on this machine, with weights packed once.

python benchmarks/bound.py MODEL --dtype float32      # prints one JSON line

Attention, norms, sampling and Python take additional time in a real engine. The printed tokens/s
are therefore an upper bound for any engine that computes each token of the prefix tree once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from transformers import AutoConfig
from workloads import Row, workload

from batchinfer.worker.linear.packed_linear import PackedLinear
from batchinfer.worker.linear_kernels import linear_kernels

ROWS = 64
"""Rows per matrix product: the sequences in a step when workloads run with a quarter of their
rows."""


def layer_shapes(config: AutoConfig) -> list[tuple[int, int]]:
    """Return (in, out) of a decoder layer's linear layers, with q/k/v and gate/up merged."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width = hidden // config.num_attention_heads
    qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * width
    return [(hidden, qkv), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]


def seconds_per_token(shapes: list[tuple[int, int]], copies: int, dtype: torch.dtype) -> float:
    """Return the median seconds per row for all linear layers together, with the fastest kernel.
    Each layer has separate weights."""
    plain = [
        torch.nn.Linear(*shape, bias=False, dtype=dtype).requires_grad_(False)
        for _ in range(copies)
        for shape in shapes
    ]
    inputs = {width: torch.randn(ROWS, width).to(dtype) for width, _ in shapes}
    medians = []
    for kernel in linear_kernels(dtype):
        layers = [PackedLinear(linear, kernel) for linear in plain]
        times = []
        for _ in range(25):
            began = time.perf_counter()
            for layer in layers:
                layer(inputs[layer.in_features])
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times[5:]) / ROWS)
    return min(medians)


def computed_tokens(rows: list[Row]) -> int:
    """Count the tokens to compute: each common prefix of prompts once, and the output tokens of
    each sample except its last."""
    tree = {tuple(row.prompt[: at + 1]) for row in rows for at in range(len(row.prompt))}
    return len(tree) + sum(row.n * (row.output_len - 1) for row in rows)


def bound(model: str, dtype: torch.dtype, scale: float) -> dict[str, float]:
    """Return output tokens/s of each workload if only linear layers took time."""
    config = AutoConfig.from_pretrained(model)
    layers = seconds_per_token(layer_shapes(config), config.num_hidden_layers, dtype)
    head = seconds_per_token([(config.hidden_size, config.vocab_size)], 4, dtype) / 4
    bounds = {}
    for name in ("W1", "W2", "W3"):
        rows = workload(name, scale)
        outputs = sum(row.n * row.output_len for row in rows)
        bounds[name] = outputs / (computed_tokens(rows) * layers + outputs * head)
    return bounds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    with torch.inference_mode():
        print(json.dumps(bound(args.model, dtype, args.scale)))
