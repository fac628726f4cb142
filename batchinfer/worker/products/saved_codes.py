"""Codes of few bits in a checkpoint, found again for the layers that were loaded from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchinfer.kernels.float8_rows import Float8Rows
from batchinfer.kernels.fp8_blocks import BLOCK, num_blocks
from batchinfer.kernels.low_bit import Int4Weight, Int8Weight, LowBitWeight
from batchinfer.worker.model.checkpoint import weight_files
from batchinfer.worker.model.quantised.checkpoint import Dequantised, dequantised_tensors
from batchinfer.worker.model.quantised.choose import choose_format
from batchinfer.worker.model.quantised.few_bits import (
    BlockWeight,
    FewBits,
    IntegerWeight,
    TableWeight,
)
from batchinfer.worker.model.quantised.stored import Quantised
from batchinfer.worker.model.quantization import saved_section
from batchinfer.worker.products.codes import Codes, KeptCodes, keep_codes
from batchinfer.worker.products.float8_weight import Float8Weight
from batchinfer.worker.products.saved_experts import in_layers, keep_codes_of_experts

KEPT: Mapping[str, type[Codes]] = {"int8": Int8Weight, "int4": Int4Weight, "fp8": Float8Weight}
"""Values of ``model.quantization`` for which codes are kept, and their kind; float8 is
``Float8Rows`` on a CPU."""
_OF_EXPERTS: Mapping[str, tuple[type[Codes], ...]] = {
    "int8": (Int8Weight, Int4Weight),
    "int4": (Int4Weight,),
    "fp8": (Float8Rows,),
}
"""Those for which a mixture's experts keep theirs: of as many bits, or fewer."""
_INT8_MOST = 127
_NAN = 0x7F  # of float8 e4m3fn, but for the sign
_STEP = 8  # codes of 4 bits that a kernel reads together


def keep_saved_codes(
    model: nn.Module, folder: Path, config: Mapping[str, Any], method: str, device_type: str
) -> int:
    """Keep the codes that linear layers were saved with, where they are of the kind wanted.

    Call it before layers are fused. Layers that were saved in another way keep none (zeros beside
    int8, other bits, groups of unequal sizes, other blocks of float8), nor do those whose numbers
    are not the saved ones, bit for bit, because loading moved them.

    Args:
        model: as it was loaded from the folder.
        config: the folder's config.
        method: a key of ``KEPT``.
        device_type: of the device whose kernels will multiply, ``cpu`` or ``cuda``.

    Returns:
        How many linear layers' codes were kept; experts' are found when they are packed.
    """
    saved_as = choose_format(saved_section(config))
    if saved_as is None:
        return 0
    paths = [folder / name for name in weight_files(folder)]
    saved = defaultdict(list)
    for name, tensor in dequantised_tensors(paths, saved_as, torch.float32).items():
        if isinstance(tensor, Dequantised):
            saved[in_layers(name)].append(tensor.weight)
    kind = Float8Rows if (method, device_type) == ("fp8", "cpu") else KEPT[method]
    if device_type == "cpu":
        keep_codes_of_experts(model, saved, partial(_as_one_of, _OF_EXPERTS[method]))
    count = 0
    for name, module in model.named_modules():
        for weight in saved[in_layers(f"{name}.weight")] if isinstance(module, nn.Linear) else ():
            kept = _codes(weight, kind, module.weight.detach())
            if kept is not None:
                keep_codes(module, kept)
                count += 1
    return count


def as_codes(weight: FewBits) -> Codes | None:
    """A saved weight as the kernels take it; None: they take none of its kind."""
    if isinstance(weight, TableWeight):
        return _of_table(weight)
    return _float8(weight) if isinstance(weight, BlockWeight) else _low_bit(weight)


def _as_one_of(kinds: tuple[type[Codes], ...], weight: FewBits) -> Any:
    if isinstance(weight, BlockWeight) and Float8Rows in kinds:
        return _float8_rows(weight)
    codes = as_codes(weight)
    return codes if isinstance(codes, kinds) else None


def _of_table(weight: TableWeight) -> Int4Weight | None:
    """Its table as it is where all of it are multiples of one number, else to the nearest of 127
    steps, the largest number becoming 127."""
    size = weight.codes.shape[1] // weight.scales.shape[1]
    sizes = weight.table.abs()
    if size % _STEP or not sizes.max() > 0:
        return None
    step = sizes[sizes > 0].min()
    if not _are_steps(sizes / step):
        step = sizes.max() / _INT8_MOST
    table = (weight.table / step).round().to(torch.int8)
    zeros = torch.zeros_like(weight.scales, dtype=torch.uint8)
    return Int4Weight(weight.codes, weight.scales * step, zeros, size, table)


def _are_steps(counts: torch.Tensor) -> bool:
    return bool((counts == counts.round()).all() and counts.max() <= _INT8_MOST)


def _float8(weight: BlockWeight) -> Float8Weight | None:
    """In blocks of 128 x 128, also where all of it has one scale."""
    if weight.codes.dtype != torch.float8_e4m3fn:
        return None
    if weight.scales.numel() == 1:
        blocks = map(num_blocks, weight.codes.shape)
        return Float8Weight(weight.codes, weight.scales.expand(*blocks).contiguous())
    return Float8Weight(weight.codes, weight.scales) if weight.block == (BLOCK, BLOCK) else None


def _float8_rows(weight: BlockWeight) -> Float8Rows | None:
    codes, (_, width) = weight.codes, weight.block
    if codes.dtype != torch.float8_e4m3fn or (width % 2 and width < codes.shape[1]):
        return None
    if bool(((codes.view(torch.uint8) & _NAN) == _NAN).any()):
        return None
    return Float8Rows.of_blocks(codes, weight.scales, weight.block)


def _low_bit(weight: IntegerWeight) -> LowBitWeight | None:
    outputs, inputs = weight.numbers.shape
    groups, zeros = weight.scales.shape[1], weight.zeros
    scales = weight.scales.float().expand(outputs, groups)
    if weight.bits == 8 and groups == 1 and weight.group_of is None:
        signed = weight.numbers.dtype == torch.int8
        middle = 0 if signed else 128
        if zeros is not None and not bool((zeros == middle).all()):
            return None
        codes = weight.numbers if signed else (weight.numbers.short() - middle).to(torch.int8)
        return Int8Weight(codes.contiguous(), scales[:, 0].contiguous())
    size = inputs // groups if groups > 1 else -(-inputs // _STEP) * _STEP
    numbers, order = weight.numbers, None
    if weight.group_of is not None:
        sorted_, by_group = weight.group_of.sort(stable=True)
        size = int((sorted_ == 0).sum())
        in_order = size > 0 and torch.equal(sorted_.long(), torch.arange(inputs) // size)
        if not in_order or -(-inputs // size) != groups:
            return None
        numbers, order = numbers[:, by_group], by_group.int()
    if weight.bits != 4 or size % _STEP or zeros is None:
        return None
    zeros = zeros.to(torch.uint8).expand(outputs, groups).contiguous()
    return Int4Weight(numbers.contiguous(), scales.contiguous(), zeros, size, order=order)


def _codes(weight: Quantised, kind: type[Codes], loaded: torch.Tensor) -> KeptCodes | None:
    """The codes of a saved weight, if they are of a kind and what ``loaded`` was made of."""
    if weight.shape != tuple(loaded.shape):
        return None
    read = partial(_read, weight, kind)
    codes = read()
    if codes is None:
        return None
    saved = weight.read(loaded.dtype).to(loaded.dtype).to(loaded.device)
    return KeptCodes.of(codes, read) if torch.equal(saved, loaded) else None


def _read(weight: Quantised, kind: type[Codes]) -> Any:
    """The codes of a saved weight; None: it has none of this kind."""
    few_bits = weight.read_few_bits()
    return None if few_bits is None else _as_one_of((kind,), few_bits)
