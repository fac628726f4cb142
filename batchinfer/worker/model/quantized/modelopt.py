"""Reads ModelOpt's formats: FP8 with a scale for each weight, NVFP4, and mixtures of both.

Source: Model Optimizer's ``export/quant_utils.py`` and ``export/convert_hf_config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.worker.model.quantized.config_key import one_of, refused
from batchinfer.worker.model.quantized.float4 import (
    NVFP4_GROUP,
    joined_experts,
    nvfp4_weight,
)
from batchinfer.worker.model.quantized.float8 import Float8
from batchinfer.worker.model.quantized.stored_tensors import Quantized, Stored, part_of

_MIXED = "MIXED_PRECISION"
_NVFP4 = ("NVFP4", "W4A16_NVFP4")
"""Names of NVFP4 with and without scales of activations."""
_ALGORITHMS = ("FP8", *_NVFP4)
_SCALE, _GLOBAL = ".weight_scale", ".weight_scale_2"
_JOINED = frozenset({"_weight_scale", "_weight_scale_2"})
"""Suffixes of scales of tensors that are not called ``weight``, such as ``gate_up_proj``."""


class ModelOpt:
    """A checkpoint written by ModelOpt. The names of a weight's tensors show whether it is FP8 or
    NVFP4."""

    ends: Mapping[str, str] = {
        **dict.fromkeys((_SCALE, _GLOBAL), ".weight"),
        **dict.fromkeys(_JOINED, ""),
    }

    def __init__(self, saved: Mapping[str, Any]) -> None:
        algorithm = one_of(saved, "quant_algo", (*_ALGORITHMS, _MIXED))
        self.name = f"modelopt {algorithm}"
        self._float8 = Float8(self.name, (_SCALE,))
        if algorithm in _NVFP4:
            one_of(saved, "group_size", (NVFP4_GROUP,), default=NVFP4_GROUP)
        layers = saved.get("quantized_layers") or {}
        if not isinstance(layers, Mapping):
            raise refused("quantized_layers", layers, "it must be an object")
        for layer, entry in layers.items():
            _check_layer(f"quantized_layers[{layer!r}]", entry)

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Quantized | None:
        if _JOINED & parts.keys():
            raise joined_experts(name)
        if _GLOBAL not in parts and ("" not in parts or parts[""].dtype != "U8"):
            return self._float8.weight(name, parts)
        data, scales, factor = (part_of(name, parts, end) for end in ("", _SCALE, _GLOBAL))
        return nvfp4_weight(name, data, scales, factor, is_reciprocal=False)


def _check_layer(key: str, entry: Any) -> None:
    if not isinstance(entry, Mapping):
        raise refused(key, entry, "it must be an object")
    one_of(entry, f"{key}.quant_algo", _ALGORITHMS)
    one_of(entry, f"{key}.group_size", (NVFP4_GROUP, None))
