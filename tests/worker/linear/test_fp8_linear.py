"""Models with float8 weights give the logits of rounded weights, also in fused and small layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchinfer.config import ModelConfig
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import ModelError
from batchinfer.kernels.fp8_blocks import dequantize_blocks, quantize_blocks
from batchinfer.kernels.reference import quantize_groups
from batchinfer.worker.attention.attention import ATTENTION_NAME, make_backend, register
from batchinfer.worker.attention.cuda import CudaAttention
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear.fp8_linear import Float8PackedWeight, fp8_kernel, quantize_fp8
from batchinfer.worker.linear.packed_linear import PackedLinear
from batchinfer.worker.memory import model_bytes
from tests.devices import NEEDS_CUDA
from tests.kernels.fp8_cases import build_groups
from tests.models import VOCAB_SIZE, make_checkpoint, tiny_model
from tests.worker.on_triton import pretend_cuda, traced
from tests.worker.step_maker import StepMaker

IDS = np.random.default_rng(0).integers(2, VOCAB_SIZE, 9).tolist()
# Sizes are multiples of a block, so a merged weight has the blocks of its parts.
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def fused(family: str) -> tuple[Any, KVLayout]:
    """Return a model with the same fused layers as on a CUDA device."""
    register()
    model: Any = tiny_model(family, **SIZES)
    model.set_attn_implementation(ATTENTION_NAME)
    layout = KVLayout.from_config(model.config.to_dict(), block_size=16, dtype="float32")
    fuse(model, layout, 512)
    return model, layout


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return rows rounded to float8."""
    groups = build_groups(x)
    quantize_groups(**groups)
    scales = groups["scales"].T.repeat_interleave(128, 1)[:, : x.shape[1]]
    return groups["codes"].float() * scales


@torch.inference_mode()
def logits_of_rounded(family: str, *, rows_too: bool) -> torch.Tensor:
    """Return transformers' logits with rounded weights in all linear layers except the head.

    Args:
        rows_too: round the inputs of these layers, too.
    """
    model: Any = tiny_model(family, **SIZES)
    for module in model.modules():
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            module.weight.copy_(dequantize_blocks(*quantize_blocks(module.weight)))
            if rows_too:
                module.register_forward_pre_hook(lambda _, given: rounded(given[0][0])[None])
    logits: torch.Tensor = model(input_ids=torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "rows_too"), [("qwen2", True), ("qwen3", True), ("llama", False)]
)
def test_logits_equal_those_of_rounded_weights_and_rows(
    family: str, rows_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability = 90 if rows_too else 80
    monkeypatch.setattr("batchinfer.kernels.launch.compute_capability", lambda device: capability)
    model, layout = fused(family)
    said = quantize_fp8(model)
    assert said == f"Triton float8, rows {'of float8' if rows_too else 'of 16 bits'}"
    pretend_cuda(monkeypatch)
    cache = KVCache(layout, 8, torch.device("cpu"), torch.float32)
    maker = StepMaker(8, 16)
    step = maker.step([(maker.sequence(IDS), len(IDS))], every_logit=True)
    with traced(monkeypatch) as trace:
        got = forward(model, cache, CudaAttention(cache), step)
    launched = Counter(trace.names)
    count = 4 * SIZES["num_hidden_layers"]
    assert launched["_fp8_linear_kernel"] == count
    assert launched["_quantize_groups_kernel"] == (count if rows_too else 0)
    assert launched["linear"] == 1, "only the output head"
    wanted = logits_of_rounded(family, rows_too=rows_too)
    # A value halfway between two float8 values can round either way.
    assert (got - wanted).norm() <= (2e-2 if rows_too else 1e-5) * wanted.norm()
    with torch.inference_mode():
        plain = tiny_model(family, **SIZES)(input_ids=torch.tensor([IDS])).logits[0]
    assert (wanted - plain).norm() > 1e-2 * plain.norm(), "it is quantized"


@pytest.mark.parametrize("name", [pytest.param("cuda", marks=NEEDS_CUDA)])
@torch.inference_mode()
def test_a_model_is_quantized_as_it_is_loaded(tmp_path: Path, name: str) -> None:
    pytest.importorskip("psutil")  # GPU machines may lack it
    from batchinfer.worker.loader import load_model

    folder = make_checkpoint("qwen3", tmp_path, **SIZES)
    choice = ModelConfig(str(folder), dtype="bfloat16", quantization="fp8")
    device = torch.device(name)
    loaded = load_model(choice, device=device)
    assert loaded.kernel_names["fp8"].startswith("Triton float8")
    rows_too = "of float8" in loaded.kernel_names["fp8"]
    cache = KVCache(loaded.layout(16), 8, device, torch.bfloat16)
    maker = StepMaker(8, 16)
    step = maker.step([(maker.sequence(IDS), len(IDS))], every_logit=True)
    got = forward(loaded.model, cache, make_backend(cache), step).float().cpu()
    wanted = logits_of_rounded("qwen3", rows_too=rows_too)
    assert (got - wanted).norm() <= 1e-1 * wanted.norm()


def test_codes_and_scales_are_kept() -> None:
    model, _ = fused("llama")
    before = model_bytes(model)
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    sizes = [m.weight.shape for m in linears if m is not model.get_output_embeddings()]
    quantize_fp8(model)
    elements = sum(rows * columns for rows, columns in sizes)
    scales = sum(-(-rows // 128) * -(-columns // 128) for rows, columns in sizes)
    assert model_bytes(model) == before - 4 * elements + elements + 4 * scales
    kinds = Counter(type(module) for module in model.modules())
    assert kinds[PackedLinear] == len(sizes)
    assert kinds[nn.Linear] == 1


def test_a_layer_keeps_its_shape_dtype_and_bias() -> None:
    linear = nn.Linear(130, 70).half()
    ours = PackedLinear(linear, fp8_kernel(rows_too=False))
    assert isinstance(ours.packed, Float8PackedWeight)
    assert (ours.weight.shape, ours.weight.dtype) == (linear.weight.shape, torch.float16)
    assert ours.weight.is_meta
    x = torch.randn(2, 3, 130).half()
    back = dequantize_blocks(ours.packed.weight, ours.packed.scales)
    with torch.inference_mode():
        wanted = x.float() @ back.T + linear.bias.float()
        torch.testing.assert_close(ours(x).float(), wanted, rtol=1e-3, atol=1e-3)
        assert ours(x[:0]).shape == (0, 3, 70)


def test_low_bit_methods_refuse_unsupported_models_and_devices() -> None:
    with pytest.raises(ModelError, match="'gpt2' have no linear layers that can be quantized"):
        quantize_fp8(tiny_model("gpt2"))
