"""Bytes that a model's weights take once they are loaded, by its config. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from batchinfer.engine.kv.layout import text_config

OWN_ON_CPU = ("int8", "int4")
"""Values of ``model.quantization`` with a head of int8."""
INT8_BYTES = 1.0
_INT4_BYTES = 0.5
_SCALE_AND_ZERO = 5  # bytes beside each group of an output: a float, and a code
_STEP = 8  # groups that are kept have a multiple of so many columns
_OWN_GROUP = 64
"""Columns of a group where weights are rounded to 4 bits; torchao's are about as many."""
_MXFP4_GROUP = 32
_FLOAT8_BLOCK = 128
_SCALE = 4  # bytes
_BITSANDBYTES_GROUP = 64  # its default, which config.json does not say


def matrix_bytes(
    config: Mapping[str, Any],
    quantization: str | None,
    element_bytes: int,
    *,
    on_cpu: bool = False,
) -> float:
    """Bytes of a weight of the layers' linear layers, scales included.

    Args:
        config: the model's. Weights that torchao quantised stay so. Others are dequantised when
            they are loaded, or kept as they were saved where ``quantization`` has it so.
        quantization: ``model.quantization``.
        element_bytes: of the dtype that the model computes in.
        on_cpu: whether it is run on one.
    """
    if quantization == "fp8" and on_cpu:
        return _float8_bytes(_section(config))
    if quantization == "int8":
        return _int8_bytes(_section(config))
    if quantization == "int4":
        return _int4_bytes(_saved_group(_section(config), 4) or _OWN_GROUP)
    if quantization == "int4_weight_only":
        return _INT4_BYTES + 2 * element_bytes / _OWN_GROUP
    if quantization is not None or _section(config).get("quant_method") == "torchao":
        return INT8_BYTES  # the kinds that are loaded keep fewer bits in bytes as well
    return float(element_bytes)


def expert_bytes(
    config: Mapping[str, Any],
    quantization: str | None,
    element_bytes: int,
    *,
    on_cpu: bool = False,
) -> float:
    """Bytes of a weight of a mixture's experts, as of ``matrix_bytes``."""
    if quantization == "fp8" and on_cpu:
        return _float8_bytes(_section(config))
    if quantization not in OWN_ON_CPU:
        return float(element_bytes)  # torchao and float8 leave them as they are
    section = _section(config)
    is_mxfp4 = section.get("quant_method") == "mxfp4"
    kept = _MXFP4_GROUP if is_mxfp4 else _saved_group(section, 4)
    if kept is not None:
        return _int4_bytes(kept)
    return _int8_bytes(section) if quantization == "int8" else _int4_bytes(_OWN_GROUP)


def _int8_bytes(saved: Mapping[str, Any]) -> float:
    return INT8_BYTES + _SCALE_AND_ZERO / (_saved_group(saved, 8) or math.inf)


def _int4_bytes(group: float) -> float:
    return _INT4_BYTES + _SCALE_AND_ZERO / group


def _float8_bytes(saved: Mapping[str, Any]) -> float:
    """Of a weight with a float for each group of columns of each output."""
    block = saved.get("weight_block_size")
    group = block[1] if isinstance(block, list) and len(block) == 2 else _FLOAT8_BLOCK
    return INT8_BYTES + _SCALE / group


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    of_text = text_config(config).get("quantization_config")
    section: Mapping[str, Any] = config.get("quantization_config") or of_text or {}
    return section


def _saved_group(saved: Mapping[str, Any], bits: int) -> float | None:
    """Columns of a group of a checkpoint whose codes of so many bits are kept; infinite: of a row.

    None: it has none, or they are rounded anew.
    """
    if saved.get("quant_method") == "bitsandbytes":
        return _BITSANDBYTES_GROUP if bits == 4 and saved.get("load_in_4bit") else None
    for part in _integer_parts(saved):
        if part.get("bits", part.get("num_bits", part.get("w_bit"))) == bits:
            size = part.get("group_size")
            if size in (None, -1):
                return math.inf
            return size if type(size) is int and size % _STEP == 0 else None
    return None


def _integer_parts(saved: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a format says of its layers' integers."""
    if saved.get("quant_method") in ("awq", "gptq"):
        yield saved
    if saved.get("quant_method") == "compressed-tensors":
        for group in (saved.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            if weights.get("type", "int") == "int":
                yield weights
