"""Mixtures of experts with packed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from batchinfer.config import ModelConfig
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.kernels.low_bit import Int4Weight, round_rows
from batchinfer.worker.linear.packed_experts import PackedExperts, matrices_of, pack_experts
from batchinfer.worker.linear.prequantized_loader import as_codes
from batchinfer.worker.linear_kernels import LOW_BIT_METHODS, codes_kernel, linear_kernels
from batchinfer.worker.loader import load_model
from batchinfer.worker.memory import model_bytes
from batchinfer.worker.model.quantized.low_bit import TableWeight
from tests.models import make_checkpoint
from tests.worker.model.quantized.checkpoints import write_quantized
from tests.worker.model.quantized.test_load import (
    ALL_SEE_ALL,
    CPU,
    HYBRID,
    MXFP4,
    experts_alone,
    logits_of,
)
from tests.worker.model.quantized.writers import CASES

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 5, 48, 32, 3
SHAPE = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER}
KINDS: dict[str, tuple[Any, Any]] = {
    "gate, up, down": (Qwen3MoeExperts, Qwen3MoeConfig(**SHAPE, num_experts=NUM_EXPERTS)),
    "the other way, with biases": (
        GptOssExperts,
        GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=NUM_EXPERTS),
    ),
    "without a gate": (NemotronHExperts, NemotronHConfig(**SHAPE, n_routed_experts=NUM_EXPERTS)),
}
KERNELS = linear_kernels(torch.float32)
_ALL_SPARSE = {"moe_intermediate_size": 64, "mlp_only_layers": []}
needs_compiler = pytest.mark.skipif(
    codes_kernel("int8", torch.float32) is None, reason="no C compiler here"
)
kinds = pytest.mark.parametrize("kind", KINDS)


def make_experts(kind: str) -> torch.nn.ModuleDict:
    """Return a model with the experts of one layer and random weights."""
    torch.manual_seed(0)
    build, config = KINDS[kind]
    config._experts_implementation = "eager"
    experts = build(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return torch.nn.ModuleDict({"experts": experts})


def routed(tokens: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, and the experts and weights of each row; some experts get no row."""
    random = torch.Generator().manual_seed(seed)
    chosen = [torch.randperm(NUM_EXPERTS - 1, generator=random)[:TOP_K] for _ in range(tokens)]
    index = torch.stack(chosen) if chosen else torch.empty(0, TOP_K, dtype=torch.int64)
    x = torch.randn(tokens, HIDDEN, generator=random)
    return x, index, torch.rand(tokens, TOP_K, generator=random)


@kinds
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("tokens", [0, 1, 40])
@torch.inference_mode()
def test_experts_equal_those_of_transformers(kind: str, kernel: Any, tokens: int) -> None:
    model, inputs = make_experts(kind), routed(tokens)
    wanted = model["experts"](*inputs)
    assert pack_experts(model, kernel, torch.float32) == 1
    torch.testing.assert_close(model["experts"](*inputs), wanted, atol=1e-5, rtol=1e-4)


@needs_compiler
@kinds
@pytest.mark.parametrize("method", LOW_BIT_METHODS)
@torch.inference_mode()
def test_a_row_has_the_same_bits_with_any_other_rows(kind: str, method: str) -> None:
    x, index, weights = routed(33)
    for kernel in (codes_kernel(method, torch.float32), linear_kernels(torch.float32)[0]):
        assert kernel is not None
        model = make_experts(kind)
        pack_experts(model, kernel, torch.float32)
        together = model["experts"](x, index, weights)
        for row in (0, 7, 32):
            at = slice(row, row + 1)
            alone = model["experts"](x[at], index[at], weights[at])
            assert torch.equal(alone[0], together[row])


@needs_compiler
@kinds
def test_packed_experts_take_only_their_own_bytes(kind: str) -> None:
    model, kernel = make_experts(kind), codes_kernel("int8", torch.float32)
    assert kernel is not None
    elements = sum(matrix.weight.numel() for matrix in matrices_of(model["experts"]))
    before = model_bytes(model)
    pack_experts(model, kernel, torch.float32)
    packed = model["experts"]
    assert isinstance(packed, PackedExperts)
    assert elements <= packed.nbytes < 2.5 * elements, "int8 with scales and padding"
    assert model_bytes(model) == before - 4 * elements + packed.nbytes


@needs_compiler
@pytest.mark.parametrize("method", LOW_BIT_METHODS)
def test_a_models_experts_are_rounded_as_its_linear_layers(method: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 64, "moe_intermediate_size": 96, "mlp_only_layers": []}
    folder = make_checkpoint("qwen3_moe", tmp_path, **wide)
    rounded, plain = (
        load_model(ModelConfig(str(folder), dtype="float32", quantization=wanted), device=CPU)
        for wanted in (method, None)
    )
    for loaded in (rounded, plain):
        assert any(isinstance(module, PackedExperts) for module in loaded.model.modules())
        used = method if loaded is rounded else None
        cost = ModelCost.from_config(loaded.config, "float32", quantization=used, on_cpu=True)
        assert loaded.facts["weight_bytes"] == pytest.approx(cost.weight_bytes, rel=0.2), (
            "equal up to the scales"
        )
    noise = (logits_of(rounded) - logits_of(plain)).norm() / logits_of(plain).norm()
    assert 0 < noise < (0.2 if method == "int8" else 0.8)


@needs_compiler
@pytest.mark.parametrize("method", LOW_BIT_METHODS)
def test_mxfp4_weights_are_kept_as_saved(method: str, tmp_path: Path) -> None:
    """4-bit codes and power-of-two scales stay exact; only the input rows are rounded."""
    folder, _ = write_quantized(tmp_path, "gpt_oss", MXFP4, experts_alone, **ALL_SEE_ALL)
    model = ModelConfig(str(folder), dtype="float32")
    plain = load_model(model, device=CPU)
    kept = load_model(ModelConfig(str(folder), dtype="float32", quantization=method), device=CPU)
    assert kept.facts["weight_bytes"] < 0.5 * plain.facts["weight_bytes"]
    packed = [m for m in kept.model.modules() if isinstance(m, PackedExperts)]
    floats = [m for m in plain.model.modules() if isinstance(m, PackedExperts)]
    for ours, theirs in zip(packed, floats, strict=True):
        assert ours.nbytes < 0.25 * theirs.nbytes, "4-bit weights stay 4-bit with int8"
        random = torch.Generator().manual_seed(0)
        x = torch.randn(9, 64, generator=random)
        index = torch.randint(ours.num_experts, (9, 1), generator=random)
        one = torch.ones(9, 1)
        with torch.inference_mode():
            wanted, out = theirs(x, index, one), ours(x, index, one)
        assert (out - wanted).norm() <= 0.02 * wanted.norm()


@needs_compiler
@pytest.mark.parametrize(
    ("family", "case", "method", "changes"),
    [
        ("deepseek_v3", "packed int4", "int4", {"moe_intermediate_size": 64}),  # like Kimi K2
        ("deepseek_v3", "packed int4", "int8", {"moe_intermediate_size": 64}),
        ("qwen3_moe", "gptq with zeros", "int4", _ALL_SPARSE),
        ("qwen3_moe", "gptq with zeros", "int8", _ALL_SPARSE),
        ("qwen3_moe", "gptq 8 bits sorted", "int8", _ALL_SPARSE),
        ("mixtral", "awq", "int4", {}),
        ("qwen3_moe", "nvfp4", "int8", _ALL_SPARSE),
        ("qwen3_5_moe_text", "nvfp4 modelopt", "int4", {**_ALL_SPARSE, **HYBRID}),
        ("mixtral", "int8 in groups", "int8", {}),
    ],
)
def test_experts_saved_one_by_one_keep_their_codes(
    family: str, case: str, method: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 128, **changes}
    folder, plain = write_quantized(tmp_path, family, *CASES[case], **changes)
    saved = load_file(plain / "model.safetensors")
    model = ModelConfig(str(folder), dtype="float32", quantization=method)
    loaded = load_model(model, device=CPU)
    packed = [
        (name, module)
        for name, module in loaded.model.named_modules()
        if isinstance(module, PackedExperts)
    ]
    assert packed
    inner = 64 if "moe_intermediate_size" in changes else 128
    for name, module in packed:
        layer = name[: name.index(".", name.index("layers.") + len("layers."))]
        weights = {
            key.split("experts.")[1]: weight
            for key, weight in saved.items()
            if key.startswith(f"{layer}.") and "experts." in key and "shared" not in key
        }
        gate, up, down = (
            [weights[f"{expert}.{part}.weight"] for expert in range(module.num_experts)]
            for part in (("w1", "w3", "w2") if "0.w1.weight" in weights else PROJECTIONS)
        )
        x, rows = torch.randn(7, 64), torch.randn(7, inner)
        for expert in range(module.num_experts):
            counts = [0] * module.num_experts
            counts[expert] = 7
            both = torch.cat([gate[expert], up[expert]])
            assert_rows_are_rounded(module._times(0, x, counts), x, both)
            assert_rows_are_rounded(module._times(1, rows, counts), rows, down[expert])


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def assert_rows_are_rounded(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Check that only the input rows are rounded, up to the error of a float32 sum."""
    codes, scales = round_rows(x)
    torch.testing.assert_close(out, codes * scales[:, None] @ weight.T, atol=1e-4, rtol=1e-4)


def test_codes_of_a_table_of_steps_are_exact() -> None:
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([table, -table])
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 4)
    scales = 2.0 ** torch.randint(-8, 8, (3, 2))
    weight = as_codes(TableWeight(codes, table, scales))
    assert isinstance(weight, Int4Weight)
    wanted = table[codes.int()] * scales.repeat_interleave(32, 1)
    assert torch.equal(weight.dequantized(), wanted)
