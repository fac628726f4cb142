"""Tensors of each quantization format give the right weight; damaged tensors are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from batchinfer.errors import ModelError
from batchinfer.worker.model.quantized.formats import (
    Format,
    _place,
    choose_format,
    dequantized_tensors,
    empty_biases,
)
from batchinfer.worker.model.quantized.modelopt import ModelOpt
from tests.worker.model.quantized.writers import CASES, compressed, mxfp4, nvfp4

WEIGHT = torch.randn(72, 96, generator=torch.Generator().manual_seed(0)) * 0.3


def format_of(section: Mapping[str, Any]) -> Format:
    found = choose_format(section)
    assert found is not None
    return found


def read(
    folder: Path, section: Mapping[str, Any], parts: Mapping[str, torch.Tensor], dtype: str = ""
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint with one layer."""
    path = folder / "model.safetensors"
    save_file({f"a.{end}": part.contiguous() for end, part in parts.items()}, path)
    tensors = dequantized_tensors([path], format_of(section), getattr(torch, dtype or "float32"))
    return {name: tensor[...] for name, tensor in tensors.items()}


@pytest.mark.parametrize("case", CASES)
def test_each_format_dequantizes_to_its_weight(case: str, tmp_path: Path) -> None:
    section, writer = CASES[case]
    written = writer(WEIGHT)
    of_rows = {"input_scale": torch.ones(1), "k_scale": torch.ones(1)}
    tensors = read(tmp_path, section, {**written.parts, **of_rows, "bias": WEIGHT[0]})
    assert tensors.keys() == {"a.weight", "a.bias"}
    assert torch.equal(tensors["a.weight"], written.weight)
    assert tensors["a.weight"].is_contiguous()
    assert torch.equal(tensors["a.bias"], WEIGHT[0])
    assert 0 < (written.weight - WEIGHT).norm() < 0.5 * WEIGHT.norm(), "it is quantized"
    assert read(tmp_path, section, {"weight": WEIGHT})["a.weight"].equal(WEIGHT), (
        "a layer that is not quantized stays unchanged"
    )


@pytest.mark.parametrize("case", ["gptq", "gptq with zeros", "gptq 8 bits"])
@pytest.mark.parametrize("inputs", [8, 32, 40, 48, 80, 96])
def test_the_last_group_of_gptq_may_be_shorter(case: str, inputs: int, tmp_path: Path) -> None:
    section, writer = CASES[case]
    written = writer(WEIGHT[:, :inputs])
    assert torch.equal(read(tmp_path, section, written.parts)["a.weight"], written.weight)


def test_mxfp4_with_a_scale_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    parts = {f"proj{end}": part for end, part in mxfp4(torch.ones(2, 64, 48)).parts.items()}
    parts["proj_scales"][1, 3, 0] = 255
    with pytest.raises(ModelError, match=r"a.proj_scales contains the code 255, .* NaN in MXFP4"):
        read(tmp_path, {"quant_method": "mxfp4"}, parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_equals_transformers(dtype: str, tmp_path: Path) -> None:
    written = mxfp4(torch.randn(3, 64, 48, generator=torch.Generator().manual_seed(0)))
    parts = {f"proj{end}": part for end, part in written.parts.items()}
    ours = read(tmp_path, {"quant_method": "mxfp4"}, parts, dtype)["a.proj"]
    blocks, scales = written.parts["_blocks"], written.parts["_scales"]
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, dtype))
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    assert torch.equal(ours.float(), written.weight)


def test_fused_experts_of_float8_are_dequantized_one_by_one(tmp_path: Path) -> None:
    section, writer = CASES["fp8 blocks"]
    experts = [writer(WEIGHT * scale) for scale in (1, 3)]
    parts = {
        name: torch.stack([expert.parts[end] for expert in experts])
        for name, end in (("proj", "weight"), ("proj_scale_inv", "weight_scale_inv"))
    }
    weight = read(tmp_path, section, parts)["a.proj"]
    assert torch.equal(weight, torch.stack([expert.weight for expert in experts]))


def test_experts_of_nvfp4_in_one_tensor_are_refused(tmp_path: Path) -> None:
    parts = nvfp4(WEIGHT, modelopt=True).parts
    ends = {"weight": "", "weight_scale": "_weight_scale", "weight_scale_2": "_weight_scale_2"}
    joined = {f"gate_up_proj{end}": torch.stack([parts[name]] * 2) for name, end in ends.items()}
    with pytest.raises(ModelError, match=r"a.gate_up_proj holds all experts of a layer in one"):
        read(tmp_path, CASES["nvfp4 modelopt"][0], joined)
    parts = nvfp4(WEIGHT).parts
    joined = {name: torch.stack([part] * 2) for name, part in parts.items()}
    with pytest.raises(ModelError, match=r"a.weight_packed holds all experts of a layer in one"):
        read(tmp_path, CASES["nvfp4"][0], joined)


def test_a_modelopt_checkpoint_may_mix_fp8_and_nvfp4(tmp_path: Path) -> None:
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    section["quantized_layers"] = layers
    for case in ("modelopt", "nvfp4 modelopt"):
        written = CASES[case][1](WEIGHT)
        assert torch.equal(read(tmp_path, section, written.parts)["a.weight"], written.weight)


def test_each_group_of_layers_has_its_own_bits(tmp_path: Path) -> None:
    section = compressed("mixed-precision", type="int", num_bits=4, group_size=32)
    eight = {"strategy": "group", "type": "int", "num_bits": 8, "group_size": 32}
    for target in ("a", "re:^a$"):
        section["config_groups"]["group_1"] = {"targets": [target], "weights": eight}
        written = CASES["packed int8"][1](WEIGHT)
        assert torch.equal(read(tmp_path, section, written.parts)["a.weight"], written.weight)
    section["config_groups"] = {"group_1": {"targets": ["re:other"], "weights": eight}}
    with pytest.raises(
        ModelError, match=r"a\.weight is quantized, but no group of .*config_groups"
    ):
        read(tmp_path, section, written.parts)


def test_nvfp4_experts_may_be_mixed_with_other_formats(tmp_path: Path) -> None:
    section = _nvfp4()
    section["format"] = "mixed-precision"
    eight = {"strategy": "channel", "type": "float", "num_bits": 8}
    section["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": eight},
        "group_1": section["config_groups"]["group_0"] | {"targets": [r"re:.*experts\.\d+\."]},
    }
    path = tmp_path / "model.safetensors"
    written = {
        "l.mlp.experts.0.up_proj": CASES["nvfp4"][1](WEIGHT),
        "l.self_attn.q_proj": CASES["float8 rows"][1](WEIGHT),
    }
    tensors = {f"{at}.{end}": part for at, w in written.items() for end, part in w.parts.items()}
    save_file(tensors, path)
    read_back = dequantized_tensors([path], format_of(section), torch.float32)
    for name, expected in written.items():
        assert torch.equal(read_back[f"{name}.weight"][...], expected.weight)


def test_models_need_not_have_all_zero_gptq_biases(tmp_path: Path) -> None:
    section, writer = CASES["gptq"]
    parts = writer(WEIGHT).parts
    path = tmp_path / "model.safetensors"
    biases = {"a.bias": torch.zeros(72), "b.bias": torch.ones(72), "c.bias": torch.zeros(72)}
    layers = {f"{layer}.{end}": part.clone() for layer in "ab" for end, part in parts.items()}
    save_file({**layers, **biases, "c.weight": WEIGHT}, path)
    tensors = dequantized_tensors([path], format_of(section), torch.float32)
    assert empty_biases(tensors) == {"a.bias"}


def test_groups_of_no_activation_order_follow_each_other(tmp_path: Path) -> None:
    section, writer = CASES["packed int4"]
    written = writer(WEIGHT)
    parts = {**written.parts, "weight_g_idx": torch.full((96,), -1, dtype=torch.int32)}
    assert torch.equal(read(tmp_path, section, parts)["a.weight"], written.weight)


def test_gptq_version_key_of_later_tools_is_read(tmp_path: Path) -> None:
    section, writer = CASES["gptq v2"]
    renamed = {{"checkpoint_format": "format"}.get(key, key): section[key] for key in section}
    written = writer(WEIGHT)
    assert torch.equal(read(tmp_path, renamed, written.parts)["a.weight"], written.weight)


def test_fp8_scale_names_of_autofp8_are_read(tmp_path: Path) -> None:
    _, writer = CASES["modelopt"]
    written = writer(WEIGHT)
    section = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    parts = {**written.parts, "input_scale": torch.ones(1)}
    assert torch.equal(read(tmp_path, section, parts)["a.weight"], written.weight)


def test_codes_may_be_stored_with_a_float_dtype(tmp_path: Path) -> None:
    section, writer = CASES["nf4"]
    written = writer(WEIGHT * 0 + 1)  # all codes are 15, which reads as NaN in bfloat16
    stored = written.parts["weight"].flatten().view(torch.bfloat16)
    parts = {**written.parts, "weight": stored}
    assert stored.isnan().any()
    assert torch.equal(read(tmp_path, section, parts)["a.weight"], written.weight)


# Refused tensors

Change = Callable[[dict[str, torch.Tensor]], object]


def drop(end: str) -> Change:
    return lambda parts: parts.pop(end)


def cut(end: str) -> Change:
    return lambda parts: parts.update({end: parts[end][1:]})


def flat(end: str) -> Change:
    return lambda parts: parts.update({end: parts[end].flatten()})


def cast(end: str, dtype: torch.dtype) -> Change:
    return lambda parts: parts.update({end: parts[end].to(dtype)})


def damaged(end: str, value: float = float("nan")) -> Change:
    """Return a change that overwrites one number."""
    return lambda parts: parts[end].view(-1)[:1].fill_(value)


def in_group(group: int) -> Change:
    return lambda parts: parts.update({"weight_g_idx": torch.full((96,), group)})


def narrowed(parts: dict[str, torch.Tensor]) -> None:
    parts["weight_shape"] = torch.tensor([72, 80])
    parts["weight_packed"] = parts["weight_packed"][:, :10].contiguous()


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("fp8 blocks", drop("weight_scale_inv"), r"no tensor \*_scale_inv;"),
        ("fp8 blocks", cut("weight_scale_inv"), "scale_inv is 2 x 2 of F32; .* be 3 x 2 of F32"),
        ("fp8 blocks", cast("weight", torch.int8), "a.weight is 72 x 96 of I8; .* of F8_E4M3"),
        ("packed int4", drop("weight_shape"), r"no tensor \*.weight_shape;"),
        ("packed int4", cut("weight_packed"), "a.weight_packed is 71 x 12 of I32; .* be 72 x 12"),
        ("packed int4 with zeros", cut("weight_zero_point"), "_zero_point is 8 x 3 .* be 9 x 3"),
        ("packed int4", in_group(3), "g_idx assigns .* groups 3 to 3, but the weight has 3"),
        ("packed int4", narrowed, "rows of 80 cannot be divided into groups of 32"),
        ("int8", drop("weight_scale"), r"no tensor \*.weight_scale;"),
        (
            "fp8 blocks",
            damaged("weight_scale_inv", float("inf")),
            "scale_inv contains NaN or infinity",
        ),
        (
            "fp8 powers of two",
            lambda parts: parts["weight_scale_inv"].view(torch.uint8)[1].fill_(255),
            "a.weight_scale_inv contains NaN or infinity; fetch the model again",
        ),
        (
            "packed int4 with zeros",
            drop("weight_zero_point"),
            r"no tensor \*.weight_zero_point;",
        ),
        ("int8 with zeros", cut("weight_zero_point"), "weight_zero_point is 71 x 1 .* be 72 x 1"),
        ("float8 rows", cut("weight_scale"), "a.weight_scale is 71 x 1 of F32; .* be 1 x 1"),
        ("awq", drop("qzeros"), r"no tensor \*.qzeros;"),
        ("awq", cut("scales"), "a.scales is 2 x 72 of F16; .* must be 3 x 72"),
        ("gptq", cast("qweight", torch.int64), "a.qweight is 12 x 72 of I64; .* 12 x 72 of I32"),
        ("gptq", cut("g_idx"), "a.g_idx is 95 of I32; .* must be 96 of I32 or I64"),
        ("gptq", lambda parts: parts["g_idx"].add_(1), "groups 1 to 3, but the weight has 3"),
        ("gptq", damaged("scales"), "a.scales contains NaN or infinity; fetch the model again"),
        ("gptq sorted", drop("g_idx"), r"no tensor \*.g_idx;"),
        ("nf4", drop("weight.absmax"), r"no tensor \*.absmax;"),
        ("nf4", cut("weight"), "a.weight is 3455 x 1 of U8; .* must be 3456 x 1"),
        ("nf4", drop("weight.quant_state.bitsandbytes__nf4"), "bitsandbytes 0.41 or later"),
        ("nf4", cut("weight.quant_state.bitsandbytes__nf4"), "__nf4 cannot be read: "),
        ("nf4 nested", drop("weight.nested_absmax"), r"no tensor \*.nested_absmax;"),
        (
            "llm.int8",
            lambda parts: parts["weight_format"].add_(2),
            "a.weight_format is 2: .* not yet",
        ),
        ("llm.int8", cut("SCB"), "a.SCB is 71 of F32; .* must be 72"),
        ("nvfp4", drop("weight_global_scale"), r"no tensor \*.weight_global_scale;"),
        ("nvfp4", cut("weight_scale"), "a.weight_scale is 71 x 6 of F8_E4M3; .* be 72 x 6"),
        ("nvfp4", cast("weight_scale", torch.float32), "scale is 72 x 6 of F32; .* of F8_E4M3"),
        (
            "nvfp4",
            damaged("weight_global_scale", 0.0),
            "a.weight: .* weight is 0.0, but .* positive",
        ),
        ("packed mxfp4", cut("weight_scale"), "a.weight_scale is 71 x 3 of U8; .* be 72 x 3"),
        ("nvfp4 modelopt", damaged("weight_scale"), "a.weight_scale contains NaN or infinity"),
        ("nvfp4 modelopt", drop("weight_scale_2"), r"no tensor \*.weight_scale_2;"),
        ("nvfp4 modelopt", flat("weight"), "a.weight is 3456 of U8"),
        ("float8 whole", flat("weight"), "a.weight is 6912 of F8_E4M3; .* must be 1 x 6912 of"),
    ],
)
def test_tensors_that_do_not_match_are_refused(
    case: str, change: Change, message: str, tmp_path: Path
) -> None:
    section, writer = CASES[case]
    parts = dict(writer(WEIGHT).parts)
    change(parts)
    with pytest.raises(ModelError, match=message):
        read(tmp_path, section, parts)


_group = partial(compressed, "pack-quantized")
_nvfp4 = partial(
    compressed,
    "nvfp4-pack-quantized",
    **{"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
)
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_W4A8 = {"quant_algo": "W4A8_AWQ"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "bits in config.json is 3; supported: 2, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size .* is 0; it must be"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "marlin; supported: gptq",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:a": {}}},
            "dynamic .*; all layers must",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv; supported: gemm"),
        ({"quant_method": "awq", "bits": 8}, "bits in config.json is 8; supported: 4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size .* is \[128\]"),
        (_MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ; supported: FP8, NVFP4"),
        (_MODELOPT | {"group_size": 32}, "group_size .* is 32; supported: 16"),
        (
            _MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": _W4A8}},
            r"quantized_layers\['a'\].quant_algo .* is W4A8_AWQ; supported: FP8, NVFP4",
        ),
        (_MODELOPT | {"quantized_layers": {"a": 4}}, r"quantized_layers\['a'\] .* is 4; .* object"),
        (_MODELOPT | {"quantized_layers": ["a"]}, "quantized_layers .* must be an object"),
        ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, "format .* is"),
        (_nvfp4(group_size=32), "group_0.weights.group_size .* is 32; supported: 16"),
        (_nvfp4(symmetric=False), "group_0.weights.symmetric .* is False; supported: True"),
        (_nvfp4(strategy="group"), "group_0.weights.group_size .* is 16; supported: 32"),
        (_nvfp4(strategy="channel"), "strategy .* is channel; supported: group, tensor_group"),
        (_group(num_bits=3), r"config_groups.group_0.weights.num_bits .* is 3; supported: 2, 4, 8"),
        (_group(type="float", num_bits=6), r"group_0.weights.num_bits .* is 6; supported: 4, 8"),
        (_group(strategy="tensor_group"), "strategy .* is tensor_group; supported: tensor"),
        ({**_group(), "config_groups": {"W4A16": ["Linear"]}}, r"config_groups.W4A16 .* an object"),
        (
            {**_group(), "config_groups": [1]},
            r"config_groups .* is \[1\]; it must be an object",
        ),
        ({**_group(), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config .* is"),
        (
            {**_group(), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format",
        ),
    ],
)
def test_unsupported_sections_are_refused_by_key(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"quantization_config.*{message}"):
        choose_format(section)


def test_only_scales_of_weights_belong_to_a_weight() -> None:
    """Gemma 4's router has a parameter of its own that is called a scale."""
    assert _place("a.router.per_expert_scale", ModelOpt.ends) == ("a.router.per_expert_scale", "")
    assert _place("a.weight_scale", ModelOpt.ends) == ("a.weight", ".weight_scale")
