"""Linear layers of float8 in blocks beside cuBLAS in bfloat16, at a model's shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gpu_models import shape_of
from gpu_results import Results
from gpu_timing import seconds
from roofline import Ceilings, Shape
from torch import nn

from batchinfer.worker.linear.fp8 import Fp8Linear

_ROWS = (1, 64, 256, 4096)
_ROTATED_BYTES = 2**28  # of codes; weights in turn, so that none is found in a cache
_MOST_WEIGHTS = 32


def linears(
    results: Results, device: torch.device, ceilings: Ceilings, model: str, *, dry_run: bool
) -> None:
    """A cell for each linear layer and number of rows."""
    for name, (outputs, width) in weights_of(shape_of(model)).items():
        for rows in (3,) if dry_run else _ROWS:
            measure = partial(_measure, device, ceilings, rows, outputs, width)
            results.measure("linears", f"{model} {name} [{outputs}, {width}] x {rows}", measure)


def weights_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's merged products."""
    queries = shape.heads * shape.width
    return {
        "qkv": (queries + 2 * shape.kv_heads * shape.width, shape.hidden),
        "o": (shape.hidden, queries),
        "gate_up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
    }


@torch.inference_mode()
def _measure(
    device: torch.device, ceilings: Ceilings, rows: int, outputs: int, width: int
) -> dict[str, Any]:
    """Microseconds of a product; what float8 reads of the weights, and multiplies, a second."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    num = 1 if device.type == "cpu" else min(_MOST_WEIGHTS, _ROTATED_BYTES // (outputs * width))
    x = torch.randn(rows, width, device=device).to(dtype)
    plain = [_linear(outputs, width, device, dtype) for _ in range(max(2, num))]
    ways = {"bf16": plain} | {
        f"fp8, rows of {8 if rows_too else 16} bits": [
            Fp8Linear.quantized(linear, rows_too=rows_too) for linear in plain
        ]
        for rows_too in (True, False)
    }
    found: dict[str, Any] = {}
    for name, layers in ways.items():
        each = seconds(partial(_run, layers, x), device) / len(layers)
        found |= {
            f"{name} us": each * 1e6,
            f"{name} TFLOP/s": 2e-12 * rows * outputs * width / each,
        }
        if name != "bf16":
            found[f"{name} share of copy"] = outputs * width / each / ceilings.bytes_per_s
            found[f"{name} error"] = _difference(layers[0](x), plain[0](x))
    found["ok"] = all(found[f"{name} error"] < 0.1 for name in ways if name != "bf16")
    return found


def _linear(outputs: int, width: int, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    linear = nn.Linear(width, outputs, bias=False, device=device, dtype=dtype)
    linear.weight.normal_(std=width**-0.5)
    return linear


def _run(layers: list[Any], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the norm: that of rounding is 0.03 to 0.04, of weights and rows."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())
