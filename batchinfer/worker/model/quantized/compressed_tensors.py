"""Reads llm-compressor's format, compressed-tensors: integers, float8, MXFP4 and NVFP4.

Source: the library's ``compressors/pack_quantized``, ``compressors/naive_quantized`` and
``quantization/lifecycle/forward_helpers.py``. Groups of layers (``config_groups``) may have
different numbers of bits. This module ignores the quantization of activations
(``input_activations``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import regex
import torch

from batchinfer.errors import ModelError
from batchinfer.worker.model.quantized.config_key import block_of, group_size, one_of, refused
from batchinfer.worker.model.quantized.float4 import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    mxfp4_weight,
    nvfp4_weight,
)
from batchinfer.worker.model.quantized.float8 import FLOAT8, float8_weight
from batchinfer.worker.model.quantized.low_bit import (
    IntegerWeight,
    check_groups,
    unpack,
    words_for,
)
from batchinfer.worker.model.quantized.stored_tensors import (
    FLOATS,
    Quantized,
    Stored,
    Tensors,
    check_part,
    experts_and_matrix,
    part_of,
)

_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized", "mixed-precision", "dense"),
)
_MATCH_S = 1.0
"""Time limit in seconds for matching a pattern, because a malicious pattern could take forever."""
_PACKED, _SCALE, _ZEROS = ".weight_packed", ".weight_scale", ".weight_zero_point"
_SHAPE, _GROUP_OF, _GLOBAL = ".weight_shape", ".weight_g_idx", ".weight_global_scale"


@dataclass(frozen=True)
class _Scheme:
    targets: tuple[str, ...]
    patterns: tuple[regex.Pattern[str], ...]
    bits: int
    group_size: int | None
    block: tuple[int, int] | None
    has_zeros: bool
    float4_group: int | None
    """Group size of MXFP4 or NVFP4; None: another format."""

    def rank(self, module: str) -> int:
        """Return how the group matches a module: 0: by name, 1: by pattern, 2: by class, 3: not at
        all. Every class name matches, because only linear layers are saved in quantized form.
        """
        if module in self.targets:
            return 0
        if any(pattern.match(module, timeout=_MATCH_S) for pattern in self.patterns):
            return 1
        return 2 if any(target.isidentifier() for target in self.targets) else 3


class CompressedTensors:
    ends: Mapping[str, str] = dict.fromkeys(
        (_PACKED, _SCALE, _ZEROS, _SHAPE, _GROUP_OF, _GLOBAL), ".weight"
    )

    def __init__(self, saved: Mapping[str, Any]) -> None:
        kind = one_of(saved, "format", _FORMATS)
        self.name = f"compressed-tensors {kind}"
        sparsity = _object(saved, "sparsity_config")
        one_of(sparsity, "sparsity_config.format", ("dense",), default="dense")
        if _object(saved, "transform_config").get("config_groups"):
            raise refused(
                "transform_config", "set", "transforms, such as rotations, are not supported"
            )
        self._schemes = [
            _scheme(f"config_groups.{name}", group)
            for name, group in _object(saved, "config_groups").items()
            if not isinstance(group, Mapping) or group.get("weights")
        ]

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Quantized | None:
        if set(parts) == {""} and parts[""].dtype not in ("I8", *FLOAT8):
            return None
        scheme = self._scheme_of(name)
        if scheme.has_zeros:
            part_of(name, parts, _ZEROS)
        if scheme.float4_group == MXFP4_GROUP:
            return mxfp4_weight(part_of(name, parts, _PACKED), part_of(name, parts, _SCALE))
        if scheme.float4_group == NVFP4_GROUP:
            ends = _PACKED, _SCALE, _GLOBAL
            data, scales, divisor = (part_of(name, parts, end) for end in ends)
            return nvfp4_weight(name, data, scales, divisor, is_reciprocal=True)
        if _PACKED in parts:
            return _packed_weight(name, parts, scheme)
        numbers, scales = part_of(name, parts, ""), part_of(name, parts, _SCALE)
        if numbers.dtype in FLOAT8:
            return float8_weight(numbers, scales, scheme.block)
        return _int8_weight(numbers, scales, parts.get(_ZEROS), scheme)

    def _scheme_of(self, weight: str) -> _Scheme:
        module = weight.removesuffix(".weight")
        ranks = [(scheme.rank(module), index) for index, scheme in enumerate(self._schemes)]
        rank, index = min(ranks, default=(3, 0))
        if rank == 3:
            raise ModelError(
                f"{weight} is quantized, but no group of quantization_config.config_groups in "
                "config.json names it; take config.json and the safetensors files from the same "
                "model"
            )
        return self._schemes[index]


def _object(saved: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object at a key, or an empty object."""
    value = saved.get(key) or {}
    if not isinstance(value, Mapping):
        raise refused(key, value, "it must be an object")
    return value


def _scheme(key: str, group: Any) -> _Scheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or not isinstance(targets, list):
        raise refused(key, group, "it must be an object with targets and weights")
    patterns = [str(target)[3:] for target in targets if str(target).startswith("re:")]
    try:
        compiled = tuple(regex.compile(pattern) for pattern in patterns)
    except regex.error as error:
        raise refused(
            f"{key}.targets", patterns, f"its regular expressions are not valid: {error}"
        ) from error
    one_of(group, f"{key}.format", (None, *_FORMATS))
    key = f"{key}.weights"
    is_float = one_of(weights, f"{key}.type", ("int", "float"), default="int") == "float"
    bits = one_of(weights, f"{key}.num_bits", (4, 8) if is_float else (2, 4, 8), default=8)
    is_float4 = is_float and bits == 4
    known = ("tensor", "channel", "group", "block", None)
    float4 = {"group": MXFP4_GROUP, "tensor_group": NVFP4_GROUP}
    strategy = one_of(weights, f"{key}.strategy", tuple(float4) if is_float4 else known)
    float4_group = float4[strategy] if is_float4 else None
    if is_float4:
        one_of(weights, f"{key}.group_size", (float4_group,))
        one_of(weights, f"{key}.symmetric", (True,), default=True)
    size = group_size(weights, f"{key}.group_size") if strategy in ("group", None) else None
    block = block_of(weights, f"{key}.block_structure") if strategy == "block" else None
    if size is not None and block is None:
        block = 1, size
    has_zeros = not is_float and weights.get("symmetric") is False
    return _Scheme(tuple(map(str, targets)), compiled, bits, size, block, has_zeros, float4_group)


def _packed_weight(name: str, parts: Mapping[str, Stored], scheme: _Scheme) -> Quantized:
    words, scales = part_of(name, parts, _PACKED), part_of(name, parts, _SCALE)
    saved_shape = part_of(name, parts, _SHAPE)
    check_part(saved_shape, (len(words.shape),), "I64", "I32")
    shape = tuple(map(int, saved_shape.read().tolist()))
    *experts, height, width = experts_and_matrix(shape)
    check_part(words, (*shape[:-1], words_for(width, scheme.bits)), "I32")
    groups = _check_scales(scales, (*experts, height, width), scheme)
    kept = {end: part for end, part in parts.items() if end != _SHAPE}
    zeros = parts.get(_ZEROS)
    if zeros is not None and zeros.dtype == "I32":
        check_part(zeros, (*experts, words_for(height, scheme.bits), groups), "I32")
    elif zeros is not None:
        check_part(zeros, scales.shape, "I8")
    if _GROUP_OF in parts:
        check_part(parts[_GROUP_OF], (*experts, width), "I32", "I64")
    return Quantized.of_low_bit(shape, kept, partial(_packed_integers, name, scheme.bits, width))


def _int8_weight(
    numbers: Stored, scales: Stored, zeros: Stored | None, scheme: _Scheme
) -> Quantized:
    *experts, height, width = experts_and_matrix(numbers.shape)
    check_part(numbers, (*experts, height, width), "I8")
    _check_scales(scales, (*experts, height, width), scheme)
    parts = {_PACKED: numbers, _SCALE: scales}
    if zeros is not None:
        check_part(zeros, scales.shape, "I8")
        parts[_ZEROS] = zeros
    return Quantized.of_low_bit(numbers.shape, parts, _int8_integers)


def _check_scales(scales: Stored, shape: tuple[int, ...], scheme: _Scheme) -> int:
    """Check the scales of a weight, and return the number of scales per output."""
    *experts, height, width = shape
    if scheme.group_size and width > scheme.group_size and width % scheme.group_size:
        raise ModelError(
            f"{scales.name}: rows of {width} cannot be divided into groups of {scheme.group_size} "
            "(group_size in config.json); use files of the same model"
        )
    groups = -(-width // (scheme.group_size or max(width, 1)))
    single_scale = ((*experts, 1, 1), (*experts, 1), (1,), ())
    if scheme.group_size is not None or scales.shape not in single_scale:
        check_part(scales, (*experts, height, groups), *FLOATS)
    return groups


def _packed_integers(name: str, bits: int, width: int, tensors: Tensors) -> IntegerWeight:
    numbers, scales = unpack(tensors[_PACKED], bits)[:, :width], _matrix(tensors[_SCALE])
    zeros, offset = tensors.get(_ZEROS), 1 << (bits - 1)
    if zeros is None:
        zeros = torch.full((1, 1), offset)
    elif zeros.dtype == torch.int8:
        zeros = _matrix(zeros).int() + offset
    else:
        zeros = unpack(zeros.T, bits).T[: len(numbers)]
    group_of = tensors.get(_GROUP_OF)
    if group_of is None or bool((group_of == -1).all()):  # groups are consecutive inputs
        return IntegerWeight(bits, numbers, scales, zeros)
    check_groups(name, group_of, scales.shape[1])
    return IntegerWeight(bits, numbers, scales, zeros, group_of)


def _int8_integers(tensors: Tensors) -> IntegerWeight:
    zeros = None if _ZEROS not in tensors else _matrix(tensors[_ZEROS])
    return IntegerWeight(8, tensors[_PACKED], _matrix(tensors[_SCALE]), zeros)


def _matrix(scales: torch.Tensor) -> torch.Tensor:
    return scales if scales.dim() == 2 else scales.reshape(-1, 1)
