"""How many bytes a weight takes that was quantised. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INT4_GROUP = 64
"""Weights that share a scale and a zero, about: they are chosen to fit the model's widths."""
_INT8, _INT4 = 1.0, 0.5


def matrix_bytes(config: Mapping[str, Any], quantization: str | None, element_bytes: int) -> float:
    """Bytes of a weight of the layers' linear layers, scales included.

    Args:
        config: the model's; one saved with quantised weights says so.
        quantization: ``model.quantization``.
        element_bytes: of the dtype that the model computes in.
    """
    if quantization == "int4_weight_only":
        return _INT4 + 2 * element_bytes / _INT4_GROUP
    if quantization is not None or config.get("quantization_config"):
        return _INT8  # the kinds that are loaded keep fewer bits in bytes as well
    return float(element_bytes)
