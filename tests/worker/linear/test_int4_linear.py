"""Models with 4-bit weights on a CUDA device give the logits of their rounded or saved weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from batchinfer.config import ModelConfig
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.simulate.model_cost import ModelCost, matrix_bytes
from batchinfer.errors import ModelError
from batchinfer.kernels.low_bit import Int4Weight
from batchinfer.worker.attention.attention import ATTENTION_NAME, make_backend, register
from batchinfer.worker.attention.cuda import CudaAttention
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear.int4_linear import Int4PackedWeight, int4_kernel, quantize_int4
from batchinfer.worker.linear.packed_linear import PackedLinear
from batchinfer.worker.linear.prequantized_loader import keep_prequantized
from batchinfer.worker.memory import model_bytes
from batchinfer.worker.model.config import load_config
from batchinfer.worker.model.weights import load_weights
from tests.devices import NEEDS_CUDA
from tests.models import VOCAB_SIZE, make_checkpoint, tiny_model
from tests.worker.model.quantized.checkpoints import write_quantized
from tests.worker.model.quantized.writers import CASES
from tests.worker.on_triton import pretend_cuda, traced
from tests.worker.step_maker import StepMaker

CPU = torch.device("cpu")
IDS = np.random.default_rng(0).integers(2, VOCAB_SIZE, 9).tolist()
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""Sizes that are multiples of the kernel's blocks, which need no padding."""
KEPT = (
    *("awq", "gptq", "gptq with zeros", "gptq sorted", "gptq v2"),
    *("packed int4", "packed int4 with zeros", "packed mxfp4", "nvfp4", "nvfp4 modelopt"),
)
"""Cases whose codes the kernel multiplies as saved."""


def fused(family: str) -> tuple[Any, KVLayout]:
    """Return a model with the same fused layers as on a CUDA device."""
    register()
    model: Any = tiny_model(family, **SIZES)
    model.set_attn_implementation(ATTENTION_NAME)
    layout = KVLayout.from_config(model.config.to_dict(), block_size=16, dtype="float32")
    fuse(model, layout, 512)
    return model, layout


@torch.inference_mode()
def logits_of_rounded(family: str) -> torch.Tensor:
    """Return transformers' logits with rounded weights in all linear layers except the head."""
    model: Any = tiny_model(family, **SIZES)
    for module in model.modules():
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            module.weight.copy_(Int4Weight.rounded(module.weight, 64).dequantized())
    logits: torch.Tensor = model(input_ids=torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_logits_equal_those_of_rounded_weights(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layout = fused(family)
    assert quantize_int4(model) == "Triton int4"
    pretend_cuda(monkeypatch)
    cache = KVCache(layout, 8, CPU, torch.float32)
    maker = StepMaker(8, 16)
    step = maker.step([(maker.sequence(IDS), len(IDS))], every_logit=True)
    with traced(monkeypatch) as trace:
        got = forward(model, cache, CudaAttention(cache), step)
    launched = Counter(trace.names)
    assert launched["_int4_linear_kernel"] == 4 * SIZES["num_hidden_layers"]
    assert launched["linear"] == 1, "only the output head"
    wanted = logits_of_rounded(family)
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    with torch.inference_mode():
        plain = tiny_model(family, **SIZES)(input_ids=torch.tensor([IDS])).logits[0]
    assert (wanted - plain).norm() > 1e-2 * plain.norm(), "it is quantized"


@pytest.mark.parametrize("name", [pytest.param("cuda", marks=NEEDS_CUDA)])
@torch.inference_mode()
def test_a_model_is_quantized_as_it_is_loaded(tmp_path: Path, name: str) -> None:
    pytest.importorskip("psutil")  # GPU machines may lack it
    from batchinfer.worker.loader import load_model

    folder = make_checkpoint("qwen3", tmp_path, **SIZES)
    choice = ModelConfig(str(folder), dtype="bfloat16", quantization="int4")
    device = torch.device(name)
    loaded = load_model(choice, device=device)
    assert loaded.kernel_names["int4"] == "Triton int4"
    cache = KVCache(loaded.layout(16), 8, device, torch.bfloat16)
    maker = StepMaker(8, 16)
    step = maker.step([(maker.sequence(IDS), len(IDS))], every_logit=True)
    got = forward(loaded.model, cache, make_backend(cache), step).float().cpu()
    wanted = logits_of_rounded("qwen3")
    assert (got - wanted).norm() <= 1e-1 * wanted.norm()


@pytest.mark.parametrize("case", [*KEPT, "nf4 in rows", "int8"])
def test_saved_codes_are_multiplied_unchanged(case: str, tmp_path: Path) -> None:
    """This holds for fused layers too. Formats that the kernel does not support are rounded."""
    folder, plain = write_quantized(tmp_path, "llama", *CASES[case], **SIZES)
    config = load_config(folder)
    model = load_weights(folder, config, "bfloat16", CPU, 512)
    keep_prequantized(model, folder, config.to_dict(), "int4", "cuda")
    layout = KVLayout.from_config(config.to_dict(), block_size=16, dtype="bfloat16")
    assert fuse(model, layout, 512)
    quantize_int4(model)
    packed = [m.packed for m in model.modules() if isinstance(m, PackedLinear)]
    saved = load_file(plain / "model.safetensors")
    attention, mlp = (f"model.layers.1.{part}" for part in ("self_attn", "mlp"))
    joined = {
        tuple(f"{attention}.{name}_proj" for name in "qkv"),
        (f"{attention}.o_proj",),
        tuple(f"{mlp}.{name}_proj" for name in ("gate", "up")),
        (f"{mlp}.down_proj",),
    }
    for names in joined:
        weight = torch.cat([saved[f"{name}.weight"] for name in names]).float()
        alike = (
            torch.allclose(each.words.dequantized(), weight, rtol=1e-6, atol=0)
            for each in packed
            if isinstance(each, Int4PackedWeight)
            and each.words.outputs == len(weight)
            and each.words.width == weight.shape[1]
        )
        assert any(alike) == (case in KEPT), names


def test_a_plan_counts_the_bytes_that_layers_take(tmp_path: Path) -> None:
    for case in KEPT:
        folder, _ = write_quantized(tmp_path / case, "llama", *CASES[case], **SIZES | WIDE)
        config = load_config(folder)
        model = load_weights(folder, config, "bfloat16", CPU, 512)
        keep_prequantized(model, folder, config.to_dict(), "int4", "cuda")
        quantize_int4(model)
        linears = [m for m in model.modules() if isinstance(m, PackedLinear)]
        elements = sum(m.in_features * m.out_features for m in linears)
        each = matrix_bytes(config.to_dict(), "int4", 2)
        # NVFP4 has a factor for each output, and sorted GPTQ a place for each input.
        assert each <= sum(m.nbytes for m in linears) / elements <= each + 4 / 128, case
        cost = ModelCost.from_config(config.to_dict(), "bfloat16", quantization="int4")
        assert model_bytes(model) == pytest.approx(cost.weight_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("group_size", "expected"),
    [(128, 5 / 128), (64, 5 / 64), (256, 5 / 128), (-1, 5 / 128), (24, 5 / 64), (192, 5 / 64)],
)
def test_bytes_of_groups_on_a_cuda_device(group_size: int, expected: float) -> None:
    section = {"quant_method": "gptq", "bits": 4, "group_size": group_size}
    config = {"quantization_config": section}
    assert matrix_bytes(config, "int4", 2) == 0.5 + expected
    assert matrix_bytes(config, "int4", 2, experts=True) == 2


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_layer_keeps_its_shape_dtype_and_bias(batch_invariant: bool) -> None:
    linear = nn.Linear(130, 70).half()
    ours = PackedLinear(linear, int4_kernel(batch_invariant=batch_invariant))
    assert isinstance(ours.packed, Int4PackedWeight)
    assert ours.kernel.is_batch_invariant == batch_invariant
    assert (ours.weight.shape, ours.weight.dtype) == (linear.weight.shape, torch.float16)
    assert ours.weight.is_meta
    x = torch.randn(2, 3, 130).half()
    with torch.inference_mode():
        wanted = x.float() @ ours.packed.words.dequantized().T + linear.bias.float()
        torch.testing.assert_close(ours(x).float(), wanted, rtol=1e-3, atol=1e-3)
        assert ours(x[:0]).shape == (0, 3, 70)
        rows = x.flatten(0, 1)
        residual = rows.new_ones(6, 70)
        ours.add_to(residual, rows.t().contiguous().t())
        torch.testing.assert_close(residual.float(), wanted.flatten(0, 1) + 1, rtol=1e-3, atol=2e-3)


def test_the_head_and_routers_are_not_rounded() -> None:
    model = tiny_model("llama", **SIZES)
    model.model.layers[1].router = nn.Linear(64, 8)
    quantize_int4(model)
    assert type(model.model.layers[1].router) is nn.Linear
    assert type(model.get_output_embeddings()) is nn.Linear
    assert isinstance(model.model.layers[1].mlp.down_proj, PackedLinear)


def test_models_without_linear_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="'gpt2' have no linear layers that can be quantized"):
        quantize_int4(tiny_model("gpt2"))
