"""Weights written by the formats' own libraries, where these are installed, are read correctly.

GPTQModel and AutoAWQ cannot be installed without a CUDA device, so ``writers`` replaces them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.model.quantized.test_formats import WEIGHT, read
from tests.worker.model.quantized.writers import CASES, compressed

_INT = {"type": "int", "group_size": 32, "strategy": "group"}
_FLOAT = {"type": "float", "num_bits": 8}
NVFP4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("pack-quantized", {**_INT, "num_bits": 4}),
        ("pack-quantized", {**_INT, "num_bits": 4, "symmetric": False}),
        ("pack-quantized", {**_INT, "num_bits": 8, "symmetric": False}),
        ("pack-quantized", {"type": "int", "num_bits": 4, "strategy": "channel"}),
        ("int-quantized", {"type": "int", "num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"type": "int", "num_bits": 8, "strategy": "tensor"}),
        ("naive-quantized", {**_INT, "num_bits": 8, "symmetric": False}),
        ("float-quantized", {**_FLOAT, "strategy": "tensor"}),
        ("float-quantized", {**_FLOAT, "strategy": "channel"}),
        ("float-quantized", {**_FLOAT, "strategy": "group", "group_size": 32}),
        ("float-quantized", {**_FLOAT, "strategy": "block", "block_structure": [32, 48]}),
    ],
)
def test_compressed_tensors(kind: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors")
    arguments = {"symmetric": True, **arguments}
    args = library.quantization.QuantizationArgs(**arguments)
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    height, width = arguments.get("block_structure", (1, arguments.get("group_size", 96)))
    if arguments["strategy"] == "tensor":
        height = 72
    blocks = -(-72 // height), 96 // width
    padded = torch.nn.functional.pad(WEIGHT, (0, 0, 0, blocks[0] * height - 72))
    runs = padded.unflatten(1, (blocks[1], width)).unflatten(0, (blocks[0], height))
    low, high = runs.amin((1, 3)), runs.amax((1, 3))
    scales, zeros = library.quantization.utils.calculate_qparams(low, high, args)
    state = {"weight": WEIGHT, "weight_scale": scales, "weight_zero_point": zeros}
    compressor = library.compressors.BaseCompressor.get_value_from_registry(kind)
    parts = compressor.compress(state, scheme)
    wanted = compressor.decompress(parts, scheme)["weight"]
    section = compressed(kind, **arguments)
    assert torch.equal(read(tmp_path, section, parts)["a.weight"], wanted)


def test_compressed_tensors_nvfp4(tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors")
    args = library.quantization.QuantizationArgs(**NVFP4, symmetric=True)
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    runs = WEIGHT.unflatten(1, (-1, 16))
    low, high = WEIGHT.min(), WEIGHT.max()
    divisor = library.quantization.utils.generate_gparam(low, high)
    scales, _ = library.quantization.utils.calculate_qparams(
        runs.amin(-1), runs.amax(-1), args, global_scale=divisor
    )
    state = {"weight": WEIGHT, "weight_scale": scales, "weight_global_scale": divisor.view(1)}
    compressor = library.compressors.BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    parts = compressor.compress(state, scheme)
    wanted = compressor.decompress(parts, scheme)["weight"]
    ours = read(tmp_path, compressed("nvfp4-pack-quantized", **NVFP4), parts)["a.weight"]
    assert torch.equal(ours.to(wanted.dtype), wanted)
    assert (ours - WEIGHT).norm() < 0.15 * WEIGHT.norm()


def test_compressed_tensors_mxfp4(tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors")
    arguments = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}
    args = library.quantization.QuantizationArgs(**arguments, scale_dtype=torch.uint8)
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    scales = WEIGHT.unflatten(1, (-1, 32)).abs().amax(-1).log2().floor().sub(2).exp2()
    state = {"weight": WEIGHT, "weight_scale": scales}
    compressor = library.compressors.BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    parts = compressor.compress(state, scheme)
    wanted = compressor.decompress(parts, scheme)["weight"]
    ours = read(tmp_path, compressed("mxfp4-pack-quantized", **arguments), parts)["a.weight"]
    assert torch.equal(ours.to(wanted.dtype), wanted)
    assert (ours - WEIGHT).norm() < 0.2 * WEIGHT.norm()


def test_modelopt_nvfp4_equals_what_compressed_tensors_converts_it_to(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    section, writer = CASES["nvfp4 modelopt"]
    parts = writer(WEIGHT).parts
    saved = {f"a.{end}": part for end, part in parts.items()}
    converted = ModelOptNvfp4Converter(targets=["a"]).process(saved)
    converted = {name.removeprefix("a."): part for name, part in converted.items()}
    theirs = read(tmp_path, CASES["nvfp4"][0], converted)["a.weight"]
    ours = read(tmp_path, section, parts)["a.weight"]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4_bits(kind: str, nested: bool, tmp_path: Path) -> None:
    library = pytest.importorskip("bitsandbytes")
    weight = WEIGHT[:, :64].contiguous()  # the library's CPU code starts a new block in each row
    codes, state = library.functional.quantize_4bit(
        weight, blocksize=64, quant_type=kind, compress_statistics=nested
    )
    parts = {f"weight.{end}": part for end, part in state.as_dict(packed=True).items()}
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    ours = read(tmp_path, section, {**parts, "weight": codes})["a.weight"]
    assert torch.equal(ours, library.functional.dequantize_4bit(codes, state))


def test_bitsandbytes_8_bits(tmp_path: Path) -> None:
    library = pytest.importorskip("bitsandbytes")
    codes, scales, _ = library.functional.int8_vectorwise_quant(WEIGHT.half())
    section = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    ours = read(tmp_path, section, {"weight": codes, "SCB": scales})["a.weight"]
    assert torch.equal(ours, library.functional.int8_vectorwise_dequant(codes, scales))
