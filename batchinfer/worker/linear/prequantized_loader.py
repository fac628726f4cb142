"""Finds a checkpoint's quantized codes for the layers that were loaded from the checkpoint.

A checkpoint may hold the matrices of a layer's experts in one tensor, or one tensor for each
expert. transformers joins separate tensors when it loads them: first the matrices of one expert
that share an input, then all experts of a layer. This module finds each quantized tensor by its
name, and uses the tensor only if it dequantizes to exactly the loaded numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchinfer.kernels.fp8_blocks import BLOCK, num_blocks
from batchinfer.kernels.low_bit import (
    Float8GroupedWeight,
    Int4Weight,
    Int8GroupedWeight,
    Int8Weight,
    LowBitWeight,
    can_group,
)
from batchinfer.worker.linear.packed_experts import (
    ExpertWeights,
    expert_modules,
    keep_expert_codes,
    matrices_of,
)
from batchinfer.worker.linear.prequantized_weights import (
    Codes,
    Float8Weight,
    HostCodes,
    ReadCodes,
    joined_codes,
    keep_codes,
)
from batchinfer.worker.linear.separate_experts import (
    SeparateExperts,
    in_layers,
    joined_weight,
)
from batchinfer.worker.model.check_weight_files import weight_files
from batchinfer.worker.model.quantization import saved_section
from batchinfer.worker.model.quantized.formats import (
    Dequantized,
    choose_format,
    dequantized_tensors,
)
from batchinfer.worker.model.quantized.low_bit import (
    BlockWeight,
    IntegerWeight,
    LowBitCodes,
    TableWeight,
)
from batchinfer.worker.model.quantized.stored_tensors import Quantized

Kinds = tuple[type[Codes], ...]
KEPT: Mapping[str, Kinds] = {
    "int8": (Int8Weight, Int8GroupedWeight),
    "int4": (Int4Weight,),
    "fp8": (Float8Weight,),
}
"""Types of codes that are kept, keyed by the value of ``model.quantization``. On a CPU, float8
codes are kept as ``Float8GroupedWeight``."""
_KEPT_OF_EXPERTS: Mapping[str, Kinds] = {
    "int8": (*KEPT["int8"], Int4Weight),
    "int4": (Int4Weight,),
    "fp8": (Float8GroupedWeight,),
}
"""Types of codes that are kept for experts on a CPU, including codes with fewer bits than
requested."""
_GROUPED: Mapping[int, type[Int4Weight | Int8GroupedWeight]] = {
    4: Int4Weight,
    8: Int8GroupedWeight,
}
"""Types of grouped weights, keyed by the number of bits."""
_INT8_MAX, _UINT8_MIDDLE = 127, 128
_FLOAT8_NAN = 0x7F  # bits of a float8 e4m3fn NaN, without the sign
_GROUP_MULTIPLE = 8  # the kernels need groups whose size is a multiple of this

_AsCodes = Callable[[Any], HostCodes | None]
"""Converts a saved weight to codes for a kernel; returns None for codes of an unwanted type."""


def quantized_weights(folder: Path, config: Mapping[str, Any]) -> dict[str, list[Quantized]]:
    """Read the headers of a checkpoint's quantized weights. Return the weights, keyed by
    ``in_layers(name)``. ``config`` holds the values of config.json."""
    saved_as = choose_format(saved_section(config))
    if saved_as is None:
        return {}
    paths = [folder / name for name in weight_files(folder)]
    saved = defaultdict(list)
    for name, tensor in dequantized_tensors(paths, saved_as, torch.float32).items():
        if isinstance(tensor, Dequantized):
            saved[in_layers(name)].append(tensor.weight)
    return saved


def keep_prequantized(
    model: nn.Module, folder: Path, config: Mapping[str, Any], method: str, device_type: str
) -> int:
    """Keep the saved codes of linear layers, if the kernels of ``method`` can read them.

    Call this before layers are fused. A layer is skipped if the kernels cannot read its codes
    (because of the number of bits, the groups, the table, or the size of float8 blocks). A layer is
    also skipped if its loaded numbers differ from the saved numbers, for example because loading
    rearranged them.

    Args:
        device_type: device whose kernels will multiply, ``cpu`` or ``cuda``.

    Returns:
        The number of linear layers whose codes were kept. Experts are not counted, because their
        codes are read only when they are packed.
    """
    saved = quantized_weights(folder, config)
    kinds = (Float8GroupedWeight,) if (method, device_type) == ("fp8", "cpu") else KEPT[method]
    if device_type == "cpu":
        _keep_experts(model, saved, partial(_as_one_of, _KEPT_OF_EXPERTS[method]))
    count = 0
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear)
        for weight in saved.get(in_layers(f"{name}.weight"), ()) if is_linear else ():
            read = _reader(weight, kinds, module.weight.detach())
            if read is not None:
                keep_codes(module, read)
                count += 1
    return count


def _reader(weight: Quantized, kinds: Kinds, loaded: torch.Tensor) -> ReadCodes | None:
    """Return a function that reads a saved weight's codes. Return None if the codes' type is not in
    ``kinds``, or if the codes do not dequantize to ``loaded``."""

    def read() -> Any:
        low_bit = weight.read_low_bit()
        return None if low_bit is None else _as_one_of(kinds, low_bit)

    if weight.shape != tuple(loaded.shape) or read() is None:
        return None
    saved = weight.read(loaded.dtype).to(loaded.dtype).to(loaded.device)
    return read if torch.equal(saved, loaded) else None


def _keep_experts(
    model: nn.Module, saved: Mapping[str, Sequence[Quantized]], as_codes: _AsCodes
) -> None:
    """Keep functions that read the codes of a model's experts, until the experts are packed."""
    separate = SeparateExperts(saved)
    experts = {module for _, _, module in expert_modules(model)}
    for name, module in model.named_modules():
        for matrix in matrices_of(module) if module in experts else ():
            parameter = getattr(module, matrix.name).detach()
            for weight in saved.get(in_layers(f"{name}.{matrix.name}"), ()):
                if weight.by_expert and weight.shape == tuple(parameter.shape):
                    of_tensor = partial(_expert_of_tensor, weight, parameter, as_codes)
                    keep_expert_codes(module, matrix.name, of_tensor)
            if separate.weights(name, matrix, 0):
                of_parts = partial(_expert_of_parts, separate, name, matrix, as_codes)
                keep_expert_codes(module, matrix.name, of_parts)


def _expert_of_tensor(
    weight: Quantized, loaded: torch.Tensor, as_codes: _AsCodes, expert: int
) -> HostCodes | None:
    """Return an expert's codes from a tensor that holds all experts, if they dequantize to the
    expert's part of ``loaded``."""
    saved, low_bit = weight.read_expert(expert)
    codes = None if low_bit is None else as_codes(low_bit)
    return codes if torch.equal(saved.to(loaded.dtype), loaded[expert]) else None


def _expert_of_parts(
    separate: SeparateExperts, module: str, matrix: ExpertWeights, as_codes: _AsCodes, expert: int
) -> HostCodes | torch.Tensor | None:
    """Return an expert's codes, joined from separately saved weights, if they dequantize to the
    loaded matrix. If the matrix was not loaded, and there are no codes, return its weight."""
    loaded = matrix.weight[expert]
    weights = separate.weights(module, matrix, expert)
    if not weights:
        return None
    low_bit = [weight.read_low_bit() for weight in weights]
    codes: HostCodes | None = joined_codes(
        [None if each is None else as_codes(each) for each in low_bit]
    )
    if loaded.is_meta:
        return joined_weight(weights, loaded.dtype) if codes is None else codes
    if codes is None or not torch.equal(joined_weight(weights, loaded.dtype), loaded):
        return None
    return codes


def _as_one_of(kinds: Kinds, weight: LowBitCodes) -> Any:
    if isinstance(weight, BlockWeight) and Float8GroupedWeight in kinds:
        return _float8_rows(weight)
    codes = as_codes(weight)
    return codes if isinstance(codes, kinds) else None


def as_codes(weight: LowBitCodes) -> Codes | None:
    """Convert a saved weight to codes for the kernels; None if no kernel supports them."""
    if isinstance(weight, TableWeight):
        return _from_table(weight)
    return _float8(weight) if isinstance(weight, BlockWeight) else _low_bit(weight)


def _from_table(weight: TableWeight) -> Int4Weight | None:
    """Convert a weight with a float32 lookup table to a weight with an int8 table.

    The new table is exact if all entries are small multiples of the smallest nonzero entry. In any
    other table, the entries are scaled so that the largest becomes 127, and rounded.
    """
    size = weight.codes.shape[1] // weight.scales.shape[1]
    sizes = weight.table.abs()
    if not can_group(size) or not sizes.max() > 0:
        return None
    step = sizes[sizes > 0].min()
    counts = sizes / step
    if not torch.equal(counts, counts.round()) or counts.max() > _INT8_MAX:
        step = sizes.max() / _INT8_MAX
    table = (weight.table / step).round().to(torch.int8)
    zeros = torch.zeros(weight.scales.shape, dtype=torch.uint8)
    if weight.factors is not None:
        factors = weight.factors * step
        return Int4Weight(weight.codes, weight.scales, zeros, size, table=table, factors=factors)
    return Int4Weight(weight.codes, weight.scales * step, zeros, size, table=table)


def _float8(weight: BlockWeight) -> Float8Weight | None:
    """Convert a weight to 128 x 128 blocks. A single scale is repeated for each block."""
    if weight.codes.dtype != torch.float8_e4m3fn:
        return None
    if weight.scales.numel() == 1:
        blocks = map(num_blocks, weight.codes.shape)
        return Float8Weight(weight.codes, weight.scales.expand(*blocks).contiguous())
    return Float8Weight(weight.codes, weight.scales) if weight.block == (BLOCK, BLOCK) else None


def _float8_rows(weight: BlockWeight) -> Float8GroupedWeight | None:
    codes, (_, width) = weight.codes, weight.block
    if codes.dtype != torch.float8_e4m3fn or (width % 2 and width < codes.shape[1]):
        return None
    if bool(((codes.view(torch.uint8) & _FLOAT8_NAN) == _FLOAT8_NAN).any()):
        return None
    return Float8GroupedWeight.of_blocks(codes, weight.scales, weight.block)


def _low_bit(weight: IntegerWeight) -> LowBitWeight | None:
    outputs, groups = len(weight.numbers), weight.scales.shape[1]
    numbers = weight.numbers
    zeros = torch.zeros(1, 1, dtype=torch.int8) if weight.zeros is None else weight.zeros
    if numbers.dtype == torch.int8:  # flipping the top bit adds 128, so int8 becomes uint8
        numbers, zeros = (part.view(torch.uint8) ^ _UINT8_MIDDLE for part in (numbers, zeros))
    zeros = zeros.to(torch.uint8)  # [out or 1, groups or 1]
    scales = weight.scales.float().expand(outputs, groups).contiguous()
    is_symmetric = weight.bits == 8 and bool((zeros == _UINT8_MIDDLE).all())
    if is_symmetric and groups == 1 and weight.group_of is None:
        codes = (numbers ^ _UINT8_MIDDLE).view(torch.int8)
        return Int8Weight(codes.contiguous(), scales[:, 0].contiguous())
    kind, grouping = _GROUPED.get(weight.bits), _grouping(weight)
    if kind is None or grouping is None or not can_group(grouping[0]):
        return None
    size, order = grouping
    numbers = numbers.contiguous() if order is None else numbers[:, order]
    return kind(numbers, scales, zeros.expand(outputs, groups).contiguous(), size, order)


def _grouping(weight: IntegerWeight) -> tuple[int, torch.Tensor | None] | None:
    """Return the number of inputs in a group, and the order that makes each group's inputs adjacent
    (None if the inputs are already in this order). Return None if groups have unequal sizes."""
    inputs, groups = weight.numbers.shape[1], weight.scales.shape[1]
    if weight.group_of is None:
        padded = -(-inputs // _GROUP_MULTIPLE) * _GROUP_MULTIPLE
        return (inputs // groups if groups > 1 else padded), None
    sorted_, by_group = weight.group_of.sort(stable=True)
    size = int((sorted_ == 0).sum())
    in_order = size > 0 and torch.equal(sorted_.long(), torch.arange(inputs) // size)
    if not in_order or -(-inputs // size) != groups:
        return None
    return size, None if torch.equal(sorted_, weight.group_of) else by_group.int()
