"""Ways to quantise weights when they are loaded."""

from __future__ import annotations

QUANTIZATIONS = ("int8", "int8_weight_only", "int4_weight_only")
"""Of ``model.quantization``: the project's own, and torchao's names."""
