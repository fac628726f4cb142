"""Finds the saved codes of a prequantized checkpoint for layers that were loaded from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
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
from batchinfer.worker.linear.codes import Codes, Float8Weight, ReadCodes, keep_codes
from batchinfer.worker.linear.prequantized_experts import in_layers, keep_prequantized_experts
from batchinfer.worker.model.checkpoint import weight_files
from batchinfer.worker.model.quantization import saved_section
from batchinfer.worker.model.quantized.checkpoint import Dequantized, dequantized_tensors
from batchinfer.worker.model.quantized.formats import choose_format
from batchinfer.worker.model.quantized.low_bit import (
    BlockWeight,
    IntegerWeight,
    LowBitCodes,
    TableWeight,
)
from batchinfer.worker.model.quantized.stored import Quantized

Kinds = tuple[type[Codes], ...]
KEPT: Mapping[str, Kinds] = {
    "int8": (Int8Weight, Int8GroupedWeight),
    "int4": (Int4Weight,),
    "fp8": (Float8Weight,),
}
"""Kinds of codes that are kept, by ``model.quantization``; float8 is
``Float8GroupedWeight`` on a CPU."""
_OF_EXPERTS: Mapping[str, Kinds] = {
    "int8": (*KEPT["int8"], Int4Weight),
    "int4": (Int4Weight,),
    "fp8": (Float8GroupedWeight,),
}
"""Kinds kept for the experts of a mixture: with as many bits, or fewer."""
_GROUPED: Mapping[int, type[Int4Weight | Int8GroupedWeight]] = {
    4: Int4Weight,
    8: Int8GroupedWeight,
}
"""Kinds of weights in groups, by their bits."""
_INT8_MOST, _INT8_MIDDLE = 127, 128
_NAN = 0x7F  # of float8 e4m3fn, without the sign
_STEP = 8  # a group has a multiple of this many inputs


def keep_prequantized(
    model: nn.Module, folder: Path, config: Mapping[str, Any], method: str, device_type: str
) -> int:
    """Keep the codes that linear layers were saved with, if they are of the kind wanted.

    Call it before layers are fused. Skips layers saved in another way (other bits, groups of
    unequal sizes, other float8 blocks), and layers whose loaded numbers differ from the saved ones,
    because loading rearranged them.

    Args:
        model: as it was loaded from the folder.
        config: the folder's config.
        method: a key of ``KEPT``.
        device_type: of the device whose kernels will multiply, ``cpu`` or ``cuda``.

    Returns:
        The number of linear layers whose codes were kept; experts' are found when they are packed.
    """
    saved_as = choose_format(saved_section(config))
    if saved_as is None:
        return 0
    paths = [folder / name for name in weight_files(folder)]
    saved = defaultdict(list)
    for name, tensor in dequantized_tensors(paths, saved_as, torch.float32).items():
        if isinstance(tensor, Dequantized):
            saved[in_layers(name)].append(tensor.weight)
    kinds = (Float8GroupedWeight,) if (method, device_type) == ("fp8", "cpu") else KEPT[method]
    if device_type == "cpu":
        keep_prequantized_experts(model, saved, partial(_as_one_of, _OF_EXPERTS[method]))
    count = 0
    for name, module in model.named_modules():
        for weight in saved[in_layers(f"{name}.weight")] if isinstance(module, nn.Linear) else ():
            read = _reader(weight, kinds, module.weight.detach())
            if read is not None:
                keep_codes(module, read)
                count += 1
    return count


def _reader(weight: Quantized, kinds: Kinds, loaded: torch.Tensor) -> ReadCodes | None:
    """Return a function that reads a saved weight's codes, if they have one of these kinds and
    dequantize to ``loaded``."""

    def read() -> Any:
        low_bit = weight.read_low_bit()
        return None if low_bit is None else _as_one_of(kinds, low_bit)

    if weight.shape != tuple(loaded.shape) or read() is None:
        return None
    saved = weight.read(loaded.dtype).to(loaded.dtype).to(loaded.device)
    return read if torch.equal(saved, loaded) else None


def _as_one_of(kinds: Kinds, weight: LowBitCodes) -> Any:
    if isinstance(weight, BlockWeight) and Float8GroupedWeight in kinds:
        return _float8_rows(weight)
    codes = as_codes(weight)
    return codes if isinstance(codes, kinds) else None


def as_codes(weight: LowBitCodes) -> Codes | None:
    """Convert a saved weight to codes for the kernels; None: no kernel supports it."""
    if isinstance(weight, TableWeight):
        return _from_table(weight)
    return _float8(weight) if isinstance(weight, BlockWeight) else _low_bit(weight)


def _from_table(weight: TableWeight) -> Int4Weight | None:
    """Keep its table if all entries are multiples of one number, else round it to 127 steps, with
    the largest entry becoming 127."""
    size = weight.codes.shape[1] // weight.scales.shape[1]
    sizes = weight.table.abs()
    if not can_group(size) or not sizes.max() > 0:
        return None
    step = sizes[sizes > 0].min()
    counts = sizes / step
    if not torch.equal(counts, counts.round()) or counts.max() > _INT8_MOST:
        step = sizes.max() / _INT8_MOST
    table = (weight.table / step).round().to(torch.int8)
    zeros = torch.zeros_like(weight.scales, dtype=torch.uint8)
    return Int4Weight(weight.codes, weight.scales * step, zeros, size, table=table)


def _float8(weight: BlockWeight) -> Float8Weight | None:
    """Convert it to 128 x 128 blocks, even if the whole weight has one scale."""
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
    if bool(((codes.view(torch.uint8) & _NAN) == _NAN).any()):
        return None
    return Float8GroupedWeight.of_blocks(codes, weight.scales, weight.block)


def _low_bit(weight: IntegerWeight) -> LowBitWeight | None:
    outputs, groups = len(weight.numbers), weight.scales.shape[1]
    numbers = weight.numbers
    zeros = torch.zeros(1, 1, dtype=torch.int8) if weight.zeros is None else weight.zeros
    if numbers.dtype == torch.int8:  # to uint8
        numbers, zeros = (part.view(torch.uint8) ^ _INT8_MIDDLE for part in (numbers, zeros))
    zeros = zeros.to(torch.uint8)  # [out or 1, groups or 1]
    scales = weight.scales.float().expand(outputs, groups).contiguous()
    is_symmetric = weight.bits == 8 and bool((zeros == _INT8_MIDDLE).all())
    if is_symmetric and groups == 1 and weight.group_of is None:
        codes = (numbers ^ _INT8_MIDDLE).view(torch.int8)
        return Int8Weight(codes.contiguous(), scales[:, 0].contiguous())
    kind, grouping = _GROUPED.get(weight.bits), _grouping(weight)
    if kind is None or grouping is None or not can_group(grouping[0]):
        return None
    size, order = grouping
    numbers = numbers.contiguous() if order is None else numbers[:, order]
    return kind(numbers, scales, zeros.expand(outputs, groups).contiguous(), size, order)


def _grouping(weight: IntegerWeight) -> tuple[int, torch.Tensor | None] | None:
    """The number of inputs in a group, and the order that makes the inputs of each group adjacent,
    if they are not; None: groups have unequal sizes."""
    inputs, groups = weight.numbers.shape[1], weight.scales.shape[1]
    if weight.group_of is None:
        return (inputs // groups if groups > 1 else -(-inputs // _STEP) * _STEP), None
    sorted_, by_group = weight.group_of.sort(stable=True)
    size = int((sorted_ == 0).sum())
    in_order = size > 0 and torch.equal(sorted_.long(), torch.arange(inputs) // size)
    if not in_order or -(-inputs // size) != groups:
        return None
    return size, None if torch.equal(sorted_, weight.group_of) else by_group.int()
