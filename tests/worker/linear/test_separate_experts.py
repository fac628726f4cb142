"""Experts that are read one at a time, when they are packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from batchinfer.builders import simulated_engine
from batchinfer.config import EngineConfig, ModelConfig
from batchinfer.engine.simulate.roofline import DEVICES
from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker import loader
from batchinfer.worker.linear import packed_linear, separate_experts
from batchinfer.worker.linear.packed_experts import expert_modules, matrices_of
from batchinfer.worker.linear.prequantized_loader import as_codes
from batchinfer.worker.linear_kernels import codes_kernel, pack_codes
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.model.meta_model import build_on_meta
from batchinfer.worker.model.quantized.float4 import FLOAT4
from batchinfer.worker.model.quantized.low_bit import TableWeight
from tests.models import make_text_model
from tests.worker.model.quantized.checkpoints import write_quantized
from tests.worker.model.quantized.test_load import CPU, logits_of
from tests.worker.model.quantized.writers import CASES, compressed
from tests.wrappers import make_wrapper

needs_compiler = pytest.mark.skipif(
    codes_kernel("int4", torch.float32) is None, reason="no C compiler here"
)
SPARSE = {"num_hidden_layers": 4, "moe_intermediate_size": 64, "mlp_only_layers": []}
HYBRID = {
    "moe_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
NVFP4 = CASES["nvfp4"]


@pytest.fixture
def meta_layers(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """For each time that a model is loaded: for each layer with experts, whether its experts have
    no weights before they are packed."""
    seen, keep = [], loader.keep_prequantized

    def spy(model: Any, *others: Any) -> int:
        layers = [matrices_of(experts) for _, _, experts in expert_modules(model)]
        seen.append([all(matrix.weight.is_meta for matrix in layer) for layer in layers])
        return keep(model, *others)

    monkeypatch.setattr(loader, "keep_prequantized", spy)
    return seen


def load(folder: Path, method: str, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelConfig(str(folder), dtype=dtype, quantization=method), device=CPU)


def load_whole(folder: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Load a model with all its experts."""
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_later_experts", lambda description: None)
        return load(folder, method)


@needs_compiler
@pytest.mark.parametrize(
    ("family", "case", "method", "changes", "expected"),
    [
        ("qwen3_moe", "nvfp4 modelopt", "int4", SPARSE, [False, False, True, True]),
        ("qwen3_5_moe", "nvfp4", "int8", HYBRID, [False, False, True]),  # a wrapper
        ("deepseek_v3", "fp8 blocks", "int8", SPARSE, [False, True, True]),  # the first is dense
        ("mixtral", "awq", "fp8", {"num_hidden_layers": 3}, [False, False, True]),
    ],
)
def test_a_model_loaded_without_later_experts_gives_the_same_bits(
    family: str,
    case: str,
    method: str,
    changes: dict[str, Any],
    expected: list[bool],
    meta_layers: list[list[bool]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, _ = write_quantized(tmp_path, family, *CASES[case], **changes)
    loaded, whole = load(folder, method), load_whole(folder, method, monkeypatch)
    assert meta_layers == [expected, [False] * len(expected)]
    assert torch.equal(logits_of(loaded), logits_of(whole))
    assert loaded.facts["weight_bytes"] == whole.facts["weight_bytes"]
    assert loaded.facts["parameters"] == whole.facts["parameters"]


@needs_compiler
def test_all_experts_are_loaded_if_they_are_joined_in_another_order(
    meta_layers: list[list[bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = write_quantized(tmp_path, "qwen3_moe", *NVFP4, **SPARSE)
    whole = load_whole(folder, "int8", monkeypatch)
    swapped = separate_experts._PARTS | {"gate_up_proj": (("up_proj", "gate_proj"),)}
    monkeypatch.setattr(separate_experts, "_PARTS", swapped)
    loaded = load(folder, "int8")
    assert meta_layers == [[False] * 4] * 2
    wrong = (logits_of(loaded) - logits_of(whole)).norm()
    assert wrong <= 0.2 * logits_of(whole).norm(), "codes in another order are not used"


@needs_compiler
def test_experts_that_are_neither_loaded_nor_packed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = write_quantized(tmp_path, "qwen3_moe", *NVFP4, **SPARSE)
    monkeypatch.setattr(packed_linear, "pack_experts", lambda *others, **options: 0)
    with pytest.raises(ModelError, match=r"layers.2.mlp.experts, .* cannot be quantized by this"):
        load(folder, "int8")


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_packed"), r"no tensor \*.weight_packed;"),
        (
            lambda tensors, name: tensors[f"{name}_scale"].view(torch.uint8).fill_(127),
            "weight_scale contains NaN or infinity",
        ),
        (
            lambda tensors, name: [tensors.pop(key) for key in list(tensors) if name in key],
            "the weights cannot be loaded",
        ),
    ],
)
def test_a_damaged_later_expert_is_refused(
    change: Callable[[dict[str, torch.Tensor], str], object], message: str, tmp_path: Path
) -> None:
    folder, _ = write_quantized(tmp_path, "qwen3_moe", *NVFP4, **SPARSE)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors, "model.layers.3.mlp.experts.2.up_proj.weight")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(folder, "int4")


def test_separate_experts_of_a_family_that_joins_them_are_named(tmp_path: Path) -> None:
    make_wrapper("qwen3_vl_moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".down_proj")]:
        module, joined = name.removesuffix(".down_proj"), tensors.pop(name)
        for expert, weight in enumerate(joined):
            tensors[f"{module}.{expert}.down_proj.weight"] = weight.contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"separate tensors for each expert, .* 'qwen3_vl_moe"):
        load_model(ModelConfig(str(tmp_path), dtype="float32"), device=CPU)


# The size of Qwen3.6-35B-A3B

SIZES = Qwen3_5MoeTextConfig(
    vocab_size=248_320,
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    max_position_embeddings=262_144,
)
FREE_BYTES = 32e9


def bytes_per_weight(outputs: int, inputs: int) -> float:
    """Return the bytes of an NVFP4 weight that is packed for the C kernel."""
    codes = torch.zeros(outputs, inputs, dtype=torch.uint8)
    scales = torch.ones(outputs, inputs // 16).to(torch.float8_e4m3fn)
    packed = as_codes(TableWeight(codes, FLOAT4, scales, torch.ones(outputs)))
    assert packed is not None
    return pack_codes(packed, torch.bfloat16).nbytes / codes.numel()


@needs_compiler
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_qwen3_6_35b_a3b_in_nvfp4_fits_in_32_gb(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for a CPU with 32 GB free counts the bytes that the packed weights take."""
    folder = make_text_model(tmp_path / "model")
    weights = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    section = compressed("nvfp4-pack-quantized", **weights)
    values = SIZES.to_dict() | {"quantization_config": section, "dtype": "bfloat16"}
    values["architectures"] = ["Qwen3_5MoeForCausalLM"]
    (folder / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr(simulated_engine, "free_host_bytes", lambda: int(FREE_BYTES))
    engine = EngineConfig(device="cpu", max_num_seqs=64)

    def planned(quantization: str | None) -> simulated_engine.SimulatedEngine:
        model = ModelConfig(str(folder), quantization=quantization, max_model_len=8192)
        return simulated_engine.build_dry_engine(model, engine, DEVICES["cpu"])

    with pytest.raises(DeviceError, match="weights of 65,"):
        planned(None)
    plan = planned(method)
    up, down = bytes_per_weight(1024, 2048), bytes_per_weight(2048, 512)
    assert 0.56 < up < down < 0.575, "4 bits, and a float8 scale for 16 numbers"
    num_bytes = 0.0
    for name, weight in build_on_meta(SIZES, dtype=torch.bfloat16).named_parameters():
        each = 2.0
        if ".experts." in name:
            each = up if "gate_up" in name else down
        elif "lm_head" in name:
            each = 1.0
        elif "_proj" in name:
            each = 1.0 if method == "int8" else up
        num_bytes += weight.numel() * each
    assert plan.model_facts["weight_bytes"] == pytest.approx(num_bytes, rel=0.015)
    assert num_bytes < 21.3e9
    assert plan.device_bytes() < 0.75 * FREE_BYTES
    assert plan.num_blocks // plan.slots_per_state >= 40, "recurrent states of 40 rows"
