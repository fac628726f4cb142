"""Checkpoints whose quantized weights are packed without another rounding."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from batchinfer.config import ModelConfig
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.errors import ModelError
from batchinfer.kernels.cpu import gemm
from batchinfer.kernels.fp8_blocks import dequantize_blocks, quantize_blocks
from batchinfer.kernels.low_bit import (
    GroupedWeight,
    Int4Weight,
    Int8GroupedWeight,
    Int8Weight,
    round_rows,
)
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.linear.fp8_linear import Float8PackedWeight, quantize_fp8
from batchinfer.worker.linear.kernel_choice import KernelRequirements
from batchinfer.worker.linear.packed_linear import PackedLinear
from batchinfer.worker.linear.prequantized_loader import as_codes, keep_prequantized
from batchinfer.worker.linear.prequantized_weights import Codes, Float8Weight
from batchinfer.worker.linear_kernels import codes_kernel, pack_codes
from batchinfer.worker.loader import load_model
from batchinfer.worker.model.config import load_config
from batchinfer.worker.model.quantization import is_plain
from batchinfer.worker.model.quantized.formats import (
    Dequantized,
    choose_format,
    dequantized_tensors,
)
from batchinfer.worker.model.quantized.low_bit import IntegerWeight
from batchinfer.worker.model.weights import load_weights
from tests.models import make_checkpoint
from tests.worker.model.quantized.checkpoints import write_quantized
from tests.worker.model.quantized.test_formats import WEIGHT
from tests.worker.model.quantized.test_load import CPU, IDS, load, logits_of
from tests.worker.model.quantized.writers import CASES, float8

_KEPT = {
    **dict.fromkeys(("packed int4", "packed int4 with zeros", "awq"), Int4Weight),
    **dict.fromkeys(("gptq", "gptq with zeros", "gptq sorted", "gptq v2"), Int4Weight),
    **dict.fromkeys(("fp8 whole", "modelopt", "float8 whole"), Float8Weight),
    **dict.fromkeys(("nf4 in rows", "nf4 in rows, nested"), Int4Weight),
    **dict.fromkeys(("packed mxfp4", "nvfp4", "nvfp4 modelopt"), Int4Weight),
    **dict.fromkeys(("int8", "llm.int8"), Int8Weight),
    **dict.fromkeys(("packed int8", "int8 with zeros", "int8 in groups"), Int8GroupedWeight),
    **dict.fromkeys(("gptq 8 bits", "gptq 8 bits sorted"), Int8GroupedWeight),
}
"""Class of the packed codes in each case; in all other cases, weights are quantized again."""
_ROUNDED = {"nf4 in rows", "nf4 in rows, nested", "llm.int8"}
"""Cases whose values are rounded once more: to 127 steps, or in the last bit of a float."""
FP8_128 = (
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    partial(float8, block=(128, 128), end="weight_scale_inv"),
)
BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
"""Sizes that are multiples of blocks, so that layers can be joined and groups fill cache lines."""
needs_kernel = pytest.mark.skipif(
    codes_kernel("int4", torch.float32) is None, reason="no C compiler here"
)


def codes_in(folder: Path, case: str, layer: str) -> Codes | None:
    """Return a layer's codes in the form that the kernels take."""
    saved_as = choose_format(CASES[case][0])
    assert saved_as is not None
    tensors = dequantized_tensors([folder / "model.safetensors"], saved_as, torch.float32)
    tensor = tensors[f"{layer}.weight"]
    assert isinstance(tensor, Dequantized)
    low_bit = tensor.weight.read_low_bit()
    return None if low_bit is None else as_codes(low_bit)


@pytest.mark.parametrize("case", CASES)
def test_codes_equal_the_saved_codes(case: str, tmp_path: Path) -> None:
    written = CASES[case][1](WEIGHT)
    parts = {f"a.{end}": part.contiguous() for end, part in written.parts.items()}
    save_file(parts, tmp_path / "model.safetensors")
    codes = codes_in(tmp_path, case, "a")
    assert type(codes) is _KEPT.get(case, type(None))
    if codes is None:
        return
    if case in _ROUNDED:
        step = written.weight.abs().amax(1, keepdim=True) / 127
        assert ((codes.dequantized() - written.weight).abs() <= 0.501 * step).all()
    elif case == "nvfp4":  # multiplied by the reciprocal of the saved divisor
        torch.testing.assert_close(codes.dequantized(), written.weight, rtol=1e-6, atol=0)
    else:
        assert torch.equal(codes.dequantized(), written.weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("sizes", "is_kept"),
    [
        ([32, 32, 32], True),
        ([32, 32, 16], True),
        ([96, 0, 0], False),  # some tools write this if nothing is sorted
        ([0, 32, 32], False),
        ([40, 32, 24], False),
        ([20, 20, 20], False),
    ],
)
def test_inputs_of_equal_groups_may_be_in_any_order(
    sizes: list[int], is_kept: bool, bits: int
) -> None:
    random = torch.Generator().manual_seed(0)
    group_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    group_of = group_of[torch.randperm(len(group_of), generator=random)].int()
    numbers = torch.randint(1 << bits, (8, len(group_of)), generator=random, dtype=torch.uint8)
    scales = torch.rand(8, len(sizes), generator=random)
    zeros = torch.randint(1 << bits, scales.shape, generator=random, dtype=torch.uint8)
    weight = IntegerWeight(bits, numbers, scales, zeros, group_of)
    codes = as_codes(weight)
    assert (codes is not None) == is_kept
    assert codes is None or torch.equal(codes.dequantized(), weight.dequantize())


@needs_kernel
@pytest.mark.parametrize(
    ("family", "case", "method"),
    [
        ("llama", "awq", "int4"),
        ("qwen3_vl", "int8", "int8"),
        ("llama", "gptq 8 bits", "int8"),
        ("llama", "gptq 8 bits sorted", "int8"),
        ("llama", "int8 in groups", "int8"),
        ("llama", "int8 with zeros", "int8"),
        ("llama", "gptq with zeros", "int4"),
        ("llama", "gptq sorted", "int4"),
        ("llama", "nf4 in rows, nested", "int4"),
        ("llama", "nvfp4", "int4"),
    ],
)
def test_layers_are_packed_as_they_were_saved(
    family: str, case: str, method: str, tmp_path: Path
) -> None:
    blocks = BLOCKS if family == "llama" else {}
    folder, plain = write_quantized(tmp_path, family, *CASES[case], **blocks)
    model = ModelConfig(str(folder), dtype="float32", quantization=method)
    kept = load_model(model, device=CPU)
    layers = {name: m for name, m in kept.model.named_modules() if isinstance(m, PackedLinear)}
    saved = {name.rsplit("layers.", 1)[-1] for name in load_file(plain / "model.safetensors")}
    compared = 0
    for name, layer in layers.items():
        # In a layer that adds a residual, the linear layer is called `linear`.
        tail = name.rsplit("layers.", 1)[-1].removesuffix(".linear")
        if f"{tail}.weight" not in saved or "lm_head" in name:
            continue  # merged with other layers
        prefix = "model.language_model" if family == "qwen3_vl" else "model"
        codes = codes_in(folder, case, f"{prefix}.layers.{tail}")
        assert codes is not None
        x = torch.randn(3, layer.in_features)
        assert torch.equal(layer(x), pack_codes(codes, x.dtype).times(x, None))
        compared += 1
    assert compared >= 4, "attention's and the MLP's last layers"
    dequantized = load(folder)
    assert re.fullmatch(f"{CASES[case][0]['quant_method']}.*, {method}", kept.facts["quantization"])
    if case.startswith(("awq", "gptq", "int8 in")):  # others are padded to panels or blocks
        cost = ModelCost.from_config(kept.config, "float32", quantization=method, on_cpu=True)
        assert kept.facts["weight_bytes"] == pytest.approx(cost.weight_bytes, rel=0.07)
    assert kept.facts["weight_bytes"] < dequantized.facts["weight_bytes"]
    noise = (logits_of(kept) - logits_of(dequantized)).norm()
    assert noise <= 0.2 * logits_of(dequantized).norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_in_order_are_not_sorted(bits: int) -> None:
    random = torch.Generator().manual_seed(0)
    numbers = torch.randint(1 << bits, (8, 80), generator=random, dtype=torch.uint8)
    scales = torch.rand(8, 3, generator=random)
    zeros = torch.randint(1 << bits, scales.shape, generator=random, dtype=torch.uint8)
    weight = IntegerWeight(bits, numbers, scales, zeros, torch.arange(80) // 32)
    codes = as_codes(weight)
    assert isinstance(codes, GroupedWeight)
    assert (codes.group_size, codes.order) == (32, None)
    assert torch.equal(codes.dequantized(), weight.dequantize())


@given(
    bits=st.sampled_from([2, 4, 8]),
    is_signed=st.booleans(),
    has_zeros=st.booleans(),
    size=st.sampled_from([4, 8, 20, 32, 33]),
    groups=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_codes_dequantize_to_the_saved_weight_or_are_none(
    *, bits: int, is_signed: bool, has_zeros: bool, size: int, groups: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    least = -(1 << bits - 1) if is_signed and bits == 8 else 0
    dtype = torch.int8 if least else torch.uint8
    numbers, zeros = (
        torch.randint(least, least + (1 << bits), (5, width), generator=random).to(dtype)
        for width in (size * groups, groups)
    )
    scales = torch.randn(5, groups, generator=random)
    weight = IntegerWeight(bits, numbers, scales, zeros if has_zeros else None)
    codes = as_codes(weight)
    assert (codes is not None) == (bits > 2 and (groups == 1 or size % 8 == 0))
    assert codes is None or torch.equal(codes.dequantized(), weight.dequantize())


class RoundsRows(nn.Module):
    """A linear layer that rounds its input rows to int8, but not its weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = round_rows(x.flatten(0, -2))
        rows = (codes * scales[:, None]).view_as(x)
        return nn.functional.linear(rows, self.weight)


@torch.inference_mode()
def logits_with_rows_rounded(folder: Path) -> torch.Tensor:
    """Return transformers' logits with input rows and the head's weight rounded to int8."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            is_head = name == "lm_head"
            model.set_submodule(
                name, RoundsRows(Int8Weight.rounded(weight).dequantized() if is_head else weight)
            )
    return model(input_ids=torch.tensor([IDS])).logits[0]


@needs_kernel
@pytest.mark.parametrize(
    ("case", "method"),
    [
        ("gptq sorted", "int4"),
        ("nvfp4 modelopt", "int4"),
        ("packed int8", "int8"),
        ("gptq 8 bits sorted", "int8"),
        ("int8 with zeros", "int8"),
    ],
)
def test_only_rows_are_rounded(case: str, method: str, tmp_path: Path) -> None:
    folder, plain = write_quantized(tmp_path, "llama", *CASES[case])
    model = ModelConfig(str(folder), dtype="float32", quantization=method)
    ours, wanted = logits_of(load_model(model, device=CPU)), logits_with_rows_rounded(plain)
    wrong = (ours - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert wrong.median() <= 1e-5, "a token may lie between two codes"


@needs_kernel
def test_layers_in_another_format_are_rounded_again(tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, "llama", *CASES["fp8 blocks"])
    choice = ModelConfig(str(folder), dtype="float32", quantization="int8")
    loaded, plain = load_model(choice, device=CPU), load(folder)
    assert loaded.kernel_names["int8"] == "own int8"
    noise = (logits_of(loaded) - logits_of(plain)).norm()
    assert 0 < noise <= 0.2 * logits_of(plain).norm()
    with pytest.raises(ModelError, match="already quantized; remove the key, or set it to int8"):
        load_model(ModelConfig(str(folder), quantization="int8_weight_only"), device=CPU)


def vectors(dtype: str) -> KernelRequirements:
    """Require the project's GEMM kernel with vector instructions, not tiles."""
    name = f"own {gemm.vector_instructions(getattr(torch, dtype))}"
    return KernelRequirements(pinned={dtype: name})


@needs_kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "case", "changes"),
    [
        ("llama", "fp8 blocks", {}),
        ("llama", "fp8 whole", {}),
        ("llama", "float8 rows", {}),
        # Each expert has its own tensors.
        ("deepseek_v3", "fp8 128", {"moe_intermediate_size": 128, "first_k_dense_replace": 0}),
    ],
)
def test_float8_weights_take_a_byte_on_a_cpu_and_change_no_logits(
    family: str, case: str, changes: dict[str, int], dtype: str, tmp_path: Path
) -> None:
    section, writer = FP8_128 if case == "fp8 128" else CASES[case]
    folder, _ = write_quantized(tmp_path, family, section, writer, **BLOCKS, **changes)
    required = vectors(dtype)
    kept, plain = (
        load_model(
            ModelConfig(str(folder), dtype=dtype, quantization=method), device=CPU, kernels=required
        )
        for method in ("fp8", None)
    )
    assert torch.equal(logits_of(kept), logits_of(plain))
    assert kept.kernel_names["fp8"].startswith("own float8, ")
    assert not [name for name, m in kept.model.named_modules() if is_plain(m)], "all are packed"
    cost = ModelCost.from_config(kept.config, dtype, quantization="fp8", on_cpu=True)
    assert kept.facts["weight_bytes"] == pytest.approx(cost.weight_bytes, rel=0.1)


@needs_kernel
def test_weights_are_rounded_to_float8_as_on_a_cuda_device(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", **BLOCKS)
    rounded = Path(shutil.copytree(folder, tmp_path / "rounded"))
    weights = load_file(rounded / "model.safetensors")
    for name in filter(re.compile("_proj").search, weights):
        weights[name] = dequantize_blocks(*quantize_blocks(weights[name]))
    save_file(weights, rounded / "model.safetensors", {"format": "pt"})
    required = vectors("float32")
    loaded, expected = (
        load_model(
            ModelConfig(str(saved), dtype="float32", quantization=method),
            device=CPU,
            kernels=required,
        )
        for saved, method in ((folder, "fp8"), (rounded, None))
    )
    assert torch.equal(logits_of(loaded), logits_of(expected))
    assert loaded.facts["weight_bytes"] < 0.6 * expected.facts["weight_bytes"]


def test_float8_is_multiplied_as_it_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for merged layers too."""
    monkeypatch.setattr("batchinfer.kernels.launch.compute_capability", lambda device: 90)
    folder, plain = write_quantized(tmp_path, "llama", *FP8_128, **BLOCKS)
    config = load_config(folder)
    model = load_weights(folder, config, "bfloat16", CPU, 512)
    assert keep_prequantized(model, folder, config.to_dict(), "fp8", "cuda") == 2 * 7
    layout = KVLayout.from_config(config.to_dict(), block_size=16, dtype="bfloat16")
    assert fuse(model, layout, 512)
    quantize_fp8(model)
    packed = [module.packed for module in model.modules() if isinstance(module, PackedLinear)]
    saved = load_file(plain / "model.safetensors")
    attention, mlp = (f"model.layers.1.{part}" for part in ("self_attn", "mlp"))
    joined = {
        tuple(f"{attention}.{name}_proj" for name in "qkv"),
        (f"{attention}.o_proj",),
        tuple(f"{mlp}.{name}_proj" for name in ("gate", "up")),
        (f"{mlp}.down_proj",),
    }
    for names in joined:
        weight = torch.cat([saved[f"{name}.weight"] for name in names])
        assert any(
            torch.equal(dequantize_blocks(each.weight, each.scales), weight)
            for each in packed
            if isinstance(each, Float8PackedWeight) and each.weight.shape == weight.shape
        ), names
