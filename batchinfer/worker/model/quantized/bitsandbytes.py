"""Reads bitsandbytes' 4-bit formats (NF4 and FP4, with or without nested scales), and LLM.int8().

Source: bitsandbytes' ``functional.py`` (``QuantState``, ``dequantize_4bit``,
``int8_vectorwise_dequant``). A 4-bit weight is a flat array of bytes. Each byte holds two codes,
the first in the byte's upper half. Codes are indices into a table, and ``blocksize`` consecutive
numbers share a scale. A separate tensor holds the shape and the block sizes as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from batchinfer.errors import ModelError
from batchinfer.worker.model.quantized.low_bit import IntegerWeight, TableWeight
from batchinfer.worker.model.quantized.stored_tensors import (
    FLOATS,
    Quantized,
    Stored,
    Tensors,
    check_part,
    part_of,
)

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_NESTED = (".nested_absmax", ".nested_quant_map")
_ONE_127TH = 7.874015718698502e-3  # 1 / 127, as rounded in bitsandbytes


class BitsAndBytes:
    """bitsandbytes' 4-bit and 8-bit layouts. The names of a weight's tensors decide which layout
    the weight has."""

    name = "bitsandbytes"
    ends: Mapping[str, str] = {
        **dict.fromkeys((".absmax", ".quant_map", *_NESTED, *_STATES), ""),
        ".SCB": ".weight",
        ".weight_format": ".weight",
    }

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Quantized | None:
        if ".SCB" in parts:
            return _int8_weight(name, parts)
        if set(parts) == {""} and parts[""].dtype not in ("U8", "I8"):
            return None
        return _table_weight(name, parts)


@dataclass(frozen=True)
class _State:
    """The values in the JSON text of a 4-bit weight."""

    shape: tuple[int, ...]
    blocksize: int
    nested_blocksize: int | None = None
    nested_offset: float = 0.0

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_by_rows(self) -> bool:
        """True if the weight is [out, in], and no two outputs share a scale."""
        return len(self.shape) == 2 and self.shape[1] % self.blocksize == 0


def _table_weight(name: str, parts: Mapping[str, Stored]) -> Quantized:
    ends = ("", ".absmax", ".quant_map")
    codes, scales, table = (part_of(name, parts, end) for end in ends)
    state = _state(next((parts[end] for end in _STATES if end in parts), None), name)
    num_scales = -(-state.size // state.blocksize)
    check_part(table, (16,), *FLOATS)
    if state.nested_blocksize is not None:
        nested, nested_table = (part_of(name, parts, end) for end in _NESTED)
        check_part(scales, (num_scales,), "U8")
        check_part(nested, (-(-num_scales // state.nested_blocksize),), *FLOATS)
        check_part(nested_table, (256,), *FLOATS)
    else:
        check_part(scales, (num_scales,), *FLOATS)
    if codes.dtype == "U8":
        check_part(codes, (-(-state.size // 2), 1), "U8")
    kept = {end: parts[end] for end in (*ends, *_NESTED) if end in parts}
    return Quantized(
        state.shape,
        kept,
        partial(_dequantize_table, state, name),
        low_bit=partial(_by_rows, state, name) if state.is_by_rows else None,
    )


def _dequantize_table(state: _State, name: str, tensors: Tensors) -> torch.Tensor:
    table = tensors[".quant_map"].float()
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)
    codes = _bytes(state, name, tensors)
    values = pairs.index_select(0, codes.int()).flatten()[: state.size]
    return _scaled(values, _scales(state, tensors), state.blocksize).view(state.shape)


def _by_rows(state: _State, name: str, tensors: Tensors) -> TableWeight:
    codes = _bytes(state, name, tensors)
    halves = torch.stack([codes >> 4, codes & 15], dim=1).flatten()[: state.size]
    scales = _scales(state, tensors).view(state.shape[0], -1)
    return TableWeight(halves.view(state.shape), tensors[".quant_map"].float(), scales)


def _bytes(state: _State, name: str, tensors: Tensors) -> torch.Tensor:
    """Return bytes [n] with two codes each."""
    # Some files store these bytes as bfloat16.
    codes = tensors[""].contiguous().view(torch.uint8).flatten()
    if 2 * len(codes) < state.size:
        raise ModelError(
            f"{name} has {len(codes)} bytes, too few for the {state.size} numbers "
            "of its quant_state; fetch the model again"
        )
    return codes


def _scales(state: _State, tensors: Tensors) -> torch.Tensor:
    scales = tensors[".absmax"]
    if state.nested_blocksize is None:
        return scales.float()
    values = tensors[".nested_quant_map"].float().index_select(0, scales.int())
    nested = tensors[".nested_absmax"].float()
    return _scaled(values, nested, state.nested_blocksize) + state.nested_offset


def _scaled(values: torch.Tensor, scales: torch.Tensor, blocksize: int) -> torch.Tensor:
    """Multiply each block of ``blocksize`` numbers by the block's scale. The last block may be
    shorter."""
    return values * scales.repeat_interleave(blocksize)[: len(values)]


def _state(stored: Stored | None, name: str) -> _State:
    if stored is None:
        raise ModelError(
            f"{name} is quantized, but the weight files have no {name}{_STATES[0]}; save it again "
            "with bitsandbytes 0.41 or later"
        )
    try:
        values: Mapping[str, Any] = json.loads(bytes(stored.read().tolist()))
        nested = values.get("nested_blocksize")
        state = _State(
            tuple(int(size) for size in values["shape"]),
            int(values["blocksize"]),
            None if nested is None else int(nested),
            float(values.get("nested_offset", 0.0)),
        )
        if min(*state.shape, state.blocksize, state.nested_blocksize or 1) < 1:
            raise ValueError("a size is less than 1")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"{stored.name} cannot be read: {error}; fetch the model again") from error
    return state


def _int8_weight(name: str, parts: Mapping[str, Stored]) -> Quantized:
    codes, scales = part_of(name, parts, ""), part_of(name, parts, ".SCB")
    check_part(codes, (*codes.shape[:1], *codes.shape[1:2]), "I8")
    check_part(scales, codes.shape[:1], *FLOATS)
    layout = parts.get(".weight_format")
    numbers = [] if layout is None else layout.read().flatten().tolist()
    if layout is not None and any(numbers):
        raise ModelError(
            f"{layout.name} is {numbers[0]}: LLM.int8() stored the weight in a layout for one kind "
            "of processor. Such layouts are not yet supported; save the model again with "
            "bitsandbytes 0.45 or later"
        )
    return Quantized(
        codes.shape, {"": codes, ".SCB": scales}, _dequantize_int8, low_bit=_int8_integers
    )


def _dequantize_int8(tensors: Tensors) -> torch.Tensor:
    return tensors[""].float() * tensors[".SCB"].float().unsqueeze(1) * _ONE_127TH


def _int8_integers(tensors: Tensors) -> IntegerWeight:
    return IntegerWeight(8, tensors[""], tensors[".SCB"].float().unsqueeze(1) * _ONE_127TH)
