"""Writes quantized weights in the published layout of each format, with their dequantized values.

Integers, scales and zeros are chosen first. The expected weight is computed from them element by
element. Only then are the integers packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FLOAT4 = torch.cat([FLOAT4, -FLOAT4])


@dataclass(frozen=True)
class Written:
    """A weight in the tensors of a quantization format.

    Args:
        parts: tensors, keyed by their names without the layer's name.
        weight: the dequantized weight, float32.
    """

    parts: Mapping[str, torch.Tensor]
    weight: torch.Tensor


Writer = Callable[[torch.Tensor], Written]


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack [..., n] integers into [..., n * bits / 32] words, the first integer in the lowest
    bits."""
    spare = -numbers.shape[-1] % (32 // bits)
    numbers = torch.nn.functional.pad(numbers, (0, spare))
    per_word = numbers.long().unflatten(-1, (-1, 32 // bits))
    return (per_word << torch.arange(0, 32, bits)).sum(-1).to(torch.int32)


def grouped(
    weight: torch.Tensor, bits: int, group_of: torch.Tensor, *, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return unsigned integers, scales and zeros [out, groups], and the dequantized weight."""
    most, num_groups = 2**bits - 1, int(group_of.max()) + 1
    numbers, wanted = torch.empty_like(weight, dtype=torch.int64), torch.empty_like(weight)
    scales = torch.empty(len(weight), num_groups, dtype=torch.float16)
    zeros = torch.empty(len(weight), num_groups, dtype=torch.int64)
    for group in range(num_groups):
        columns = weight[:, group_of == group]
        low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
        if symmetric:
            high = columns.abs().amax(1)
            low = -high
        scale = ((high - low) / most).to(torch.float16)
        zero = torch.full_like(low, (most + 1) // 2) if symmetric else (-low / scale).round()
        scales[:, group], zeros[:, group] = scale, zero.long().clamp(0, most)
        each = (columns / scale[:, None].float() + zeros[:, group, None]).round().clamp(0, most)
        numbers[:, group_of == group] = each.long()
        wanted[:, group_of == group] = (each - zeros[:, group, None]) * scale[:, None].float()
    return numbers, scales, zeros, wanted


def in_order(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    return torch.arange(weight.shape[1]) // group_size


def gptq(
    weight: torch.Tensor, *, bits: int = 4, symmetric: bool = True, sorts: bool = False, v2: int = 0
) -> Written:
    group_of = in_order(weight, 32)
    if sorts:
        # Layers with the same input, such as queries and keys, have the same order.
        same = torch.Generator().manual_seed(0)
        group_of = group_of[torch.randperm(len(group_of), generator=same)]
    numbers, scales, zeros, wanted = grouped(weight, bits, group_of, symmetric=symmetric)
    words = pack(zeros.T, bits)
    if not v2:
        ones = pack(torch.ones(1, 32 // bits), bits)
        words = words - ones  # GPTQModel subtracts 1 from whole words
    parts = {"qweight": pack(numbers, bits).T.contiguous(), "qzeros": words}
    parts |= {"scales": scales.T.contiguous(), "g_idx": group_of.to(torch.int32)}
    return Written(parts, wanted)


def awq(weight: torch.Tensor) -> Written:
    numbers, scales, zeros, wanted = grouped(weight, 4, in_order(weight, 32))

    def words(by_output: torch.Tensor) -> torch.Tensor:
        return pack(by_output.T.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    parts = {"qweight": words(numbers), "qzeros": words(zeros), "scales": scales.T.contiguous()}
    return Written(parts, wanted)


def packed(weight: torch.Tensor, *, bits: int = 4, symmetric: bool = True) -> Written:
    numbers, scales, zeros, wanted = grouped(
        weight, bits, in_order(weight, 32), symmetric=symmetric
    )
    parts = {"weight_packed": pack(numbers, bits), "weight_shape": torch.tensor(weight.shape)}
    parts["weight_scale"] = scales
    if not symmetric:
        parts["weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
    return Written(parts, wanted)


def int8(weight: torch.Tensor, *, symmetric: bool = True, group_size: int | None = None) -> Written:
    group_of = in_order(weight, group_size or weight.shape[1])
    numbers, scales, zeros, wanted = grouped(weight, 8, group_of, symmetric=symmetric)
    parts = {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}
    if not symmetric:
        parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return Written(parts, wanted)


def float8(
    weight: torch.Tensor,
    *,
    block: tuple[int, int],
    end: str = "weight_scale",
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Written:
    height, width = block
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    rows, columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
    scales, wanted = torch.empty(rows, columns, dtype=dtype), torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            at = (
                slice(row * height, (row + 1) * height),
                slice(column * width, (column + 1) * width),
            )
            scales[row, column] = weight[at].abs().max() / 448
            scale = scales[row, column].float()
            codes[at] = (weight[at] / scale).to(torch.float8_e4m3fn)
            wanted[at] = codes[at].float() * scale
    return Written({"weight": codes, end: scales if shape is None else scales.view(shape)}, wanted)


def table4(weight: torch.Tensor, *, nested: bool, blocksize: int = 64) -> Written:
    """Quantize in the format of bitsandbytes' NF4, but with another table, which is saved, too."""
    table = torch.linspace(-1, 1, 16) ** 3
    runs = weight.flatten().split(blocksize)
    scales = torch.stack([run.abs().max() for run in runs])
    parts: dict[str, torch.Tensor] = {"weight.quant_map": table, "weight.absmax": scales}
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": blocksize, "dtype": "float32"}
    state["shape"] = list(weight.shape)
    if nested:
        steps, offset = torch.linspace(-1, 1, 256), float(scales.mean())
        nested_scales = torch.stack([(run - offset).abs().max() for run in scales.split(16)])
        each = nested_scales.repeat_interleave(16)[: len(scales)]
        codes = ((scales - offset) / each)[:, None].sub(steps).abs().argmin(1)
        scales = steps[codes] * each + offset
        parts |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_quant_map": steps}
        parts["weight.nested_absmax"] = nested_scales
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
    codes = torch.cat(
        [(run / s)[:, None].sub(table).abs().argmin(1) for run, s in zip(runs, scales, strict=True)]
    )
    halves = codes.view(-1, 2)
    parts["weight"] = (halves[:, 0] * 16 + halves[:, 1]).to(torch.uint8).view(-1, 1)
    json_bytes = list(json.dumps(state).encode())
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(json_bytes, dtype=torch.uint8)
    places = torch.arange(weight.numel()) // blocksize
    return Written(parts, (table[codes] * scales[places]).view(weight.shape))


def llm_int8(weight: torch.Tensor) -> Written:
    scales = weight.abs().amax(1)
    numbers = (weight / scales[:, None] * 127).round().to(torch.int8)
    wanted = numbers.float() * scales[:, None] * 7.874015718698502e-3
    format_ = torch.tensor(0, dtype=torch.uint8)
    return Written({"weight": numbers, "SCB": scales, "weight_format": format_}, wanted)


def mxfp4(weight: torch.Tensor) -> Written:
    """Quantize experts [experts, in, out]; parts are named by what follows the weight's name."""
    runs = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = runs.abs().amax(-1).log2().floor() - 2
    scales = torch.pow(2.0, exponents)[..., None]
    codes = (runs / scales)[..., None].sub(FLOAT4).abs().argmin(-1)
    wanted = (FLOAT4[codes] * scales).flatten(2).transpose(1, 2)
    halves = codes.unflatten(-1, (-1, 2))
    blocks = (halves[..., 1] * 16 + halves[..., 0]).to(torch.uint8)
    parts = {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}
    return Written(parts, wanted.contiguous())


def nvfp4(weight: torch.Tensor, *, modelopt: bool = False) -> Written:
    if weight.shape[1] % 16:
        return Written({"weight": weight}, weight)  # on the ignore list
    factor = weight.abs().max() / (6 * 448)
    runs = weight.unflatten(1, (-1, 16))
    scales = (runs.abs().amax(-1) / (6 * factor)).to(torch.float8_e4m3fn)
    # compressed-tensors divides by the saved number, ModelOpt multiplies by it.
    whole = scales.float() * factor if modelopt else scales.float() / factor.reciprocal()
    codes = (runs / whole[..., None])[..., None].sub(FLOAT4).abs().argmin(-1)
    codes += 8 * (codes.eq(0) & runs.lt(0))  # negative zeros
    wanted = (FLOAT4[codes] * whole[..., None]).flatten(1)
    halves = codes.unflatten(-1, (-1, 2))
    data = (halves[..., 1] * 16 + halves[..., 0]).to(torch.uint8).flatten(1)
    if modelopt:
        parts = {"weight": data, "weight_scale": scales, "weight_scale_2": factor}
        return Written({**parts, "input_scale": torch.tensor(0.25)}, wanted)
    parts = {"weight_packed": data, "weight_scale": scales}
    parts["weight_global_scale"] = factor.reciprocal().view(1)
    return Written({**parts, "input_global_scale": torch.ones(1)}, wanted)


def packed_mxfp4(weight: torch.Tensor) -> Written:
    """Quantize a weight [out, in] in the layout of compressed-tensors."""
    if weight.shape[1] % 32:
        return Written({"weight": weight}, weight)  # on the ignore list
    written = mxfp4(weight.T[None])
    parts = {
        "weight_packed": written.parts["_blocks"][0].flatten(1),
        "weight_scale": written.parts["_scales"][0],
    }
    return Written(parts, written.weight[0].T.contiguous())


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """Return a ``quantization_config`` of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"strategy": "group", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 48], "activation_scheme": "dynamic"}
_PACKED = partial(compressed, "pack-quantized", type="int", group_size=32)
_INT8 = partial(compressed, "int-quantized", type="int", num_bits=8)
_INT8_ROWS = partial(_INT8, strategy="channel")
_FLOAT8 = partial(compressed, "float-quantized", type="float", num_bits=8)
_NVFP4 = partial(
    compressed,
    "nvfp4-pack-quantized",
    **{"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
)
_MXFP4 = partial(
    compressed, "mxfp4-pack-quantized", **{"type": "float", "num_bits": 4, "group_size": 32}
)
_ROWS = (1, 1 << 20)
_WHOLE = (1 << 20, 1 << 20)

CASES: dict[str, tuple[dict[str, Any], Writer]] = {
    "fp8 blocks": (_BLOCKS, partial(float8, block=(32, 48), end="weight_scale_inv")),
    "fp8 whole": (
        {"quant_method": "fp8", "weight_block_size": None},
        partial(float8, block=_WHOLE, end="weight_scale_inv", shape=()),
    ),
    "fp8 powers of two": (
        _BLOCKS,
        partial(float8, block=(32, 48), end="weight_scale_inv", dtype=torch.float8_e8m0fnu),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        partial(float8, block=_WHOLE, shape=()),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, partial(float8, block=_ROWS)),
    "packed int4": (_PACKED(num_bits=4), packed),
    "packed int4 with zeros": (
        _PACKED(num_bits=4, symmetric=False),
        partial(packed, symmetric=False),
    ),
    "packed int8": (_PACKED(num_bits=8), partial(packed, bits=8)),
    "int8": (_INT8_ROWS(), int8),
    "int8 with zeros": (_INT8_ROWS(symmetric=False), partial(int8, symmetric=False)),
    "int8 in groups": (
        _INT8(group_size=16, symmetric=False),
        partial(int8, symmetric=False, group_size=16),
    ),
    "float8 rows": (_FLOAT8(strategy="channel"), partial(float8, block=_ROWS)),
    "float8 whole": (_FLOAT8(strategy="tensor"), partial(float8, block=_WHOLE, shape=(1,))),
    "float8 blocks": (
        _FLOAT8(strategy="block", block_structure=[32, 48]),
        partial(float8, block=(32, 48), dtype=torch.bfloat16),
    ),
    "packed mxfp4": (_MXFP4(), packed_mxfp4),
    "nvfp4": (_NVFP4(), nvfp4),
    "nvfp4 modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        partial(nvfp4, modelopt=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "gptq": (_GPTQ, gptq),
    "gptq with zeros": ({**_GPTQ, "sym": False}, partial(gptq, symmetric=False)),
    "gptq sorted": ({**_GPTQ, "desc_act": True}, partial(gptq, sorts=True, symmetric=False)),
    "gptq v2": ({**_GPTQ, "checkpoint_format": "gptq_v2"}, partial(gptq, symmetric=False, v2=1)),
    "gptq 8 bits": ({**_GPTQ, "bits": 8}, partial(gptq, bits=8)),
    "gptq 8 bits sorted": (
        {**_GPTQ, "bits": 8, "desc_act": True},
        partial(gptq, bits=8, sorts=True, symmetric=False),
    ),
    "gptq 2 bits": ({**_GPTQ, "bits": 2}, partial(gptq, bits=2, symmetric=False)),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, partial(table4, nested=False)),
    "nf4 in rows": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        partial(table4, nested=False, blocksize=16),
    ),
    "nf4 in rows, nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        partial(table4, nested=True, blocksize=16),
    ),
    "nf4 nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        partial(table4, nested=True),
    ),
    "llm.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
}
"""For each case, the ``quantization_config`` and the writer of a layer's weight."""
