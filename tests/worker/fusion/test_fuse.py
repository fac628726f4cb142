"""Fusion replaces only modules whose results the fused module reproduces."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.step import Step
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.worker import kv_cache
from batchinfer.worker.attention.attention import ATTENTION_NAME, make_backend, register
from batchinfer.worker.attention.temperature import temper_queries
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion import fused_modules
from batchinfer.worker.fusion.fuse import fuse, fused_line
from batchinfer.worker.fusion.fused_modules import FusedAttention, FusedGatedMLP, FusedRMSNorm
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.self_test import probe_step
from tests.models import FAMILIES, VOCAB_SIZE, tiny_model
from tests.worker.step_maker import StepMaker

MAX_MODEL_LEN = 512
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SWAPPED = {  # numbers of fused attention layers, gated MLPs and norms
    "llama": (3, 3, 7),
    "qwen2": (3, 3, 7),
    "qwen3": (3, 3, 7),
    "mistral": (3, 3, 7),
    "granite": (3, 3, 7),
    "gemma2": (3, 0, 13),  # its MLPs use another activation
    "qwen3_moe": (3, 0, 7),
    "gpt_oss": (0, 0, 7),  # its rotary cosines and sines cover half a head
    "gpt2": (0, 0, 0),
}


@pytest.fixture(autouse=True, params=["native", "torch"])
def cpu_operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with the C kernels, and with the torch functions used in their absence."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_attention, "supports", lambda dtype: False)


def layout_of(model: Any) -> KVLayout:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return KVLayout.from_config(model.config.to_dict(), block_size=16, dtype=dtype)


def prepared(model: nn.Module) -> nn.Module:
    register()
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    temper_queries(model)
    return model


def swapped(model: nn.Module) -> tuple[int, int, int]:
    kinds = Counter(type(module) for module in model.modules())
    return kinds[FusedAttention], kinds[FusedGatedMLP], kinds[FusedRMSNorm]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_still_equal_transformers(family: str) -> None:
    """Run a prefill, then a step with a chunk and a decode, with a pool filled with NaN."""
    model = tiny_model(family)
    rng = np.random.default_rng(1)
    maker = StepMaker(64, 16)
    first, second = (maker.sequence(rng.integers(0, VOCAB_SIZE, n).tolist()) for n in (40, 23))
    steps = [
        maker.step(parts, every_logit=True)
        for parts in ([(first, 39), (second, 9)], [(second, 14), (first, 1)])
    ]
    with torch.inference_mode():
        eager = [
            model(input_ids=torch.tensor([sequence.token_ids]), use_cache=False).logits[0]
            for sequence in (first, second)
        ]
    expected = (torch.cat([eager[0][:39], eager[1][:9]]), torch.cat([eager[1][9:], eager[0][39:]]))
    fuse(prepared(model), layout_of(model), MAX_MODEL_LEN)
    cache = KVCache(layout_of(model), 64, torch.device("cpu"), torch.float32)
    cache.pool[:64] = torch.nan
    for step, logits in zip(steps, expected, strict=True):
        got = forward(model, cache, make_backend(cache), step)
        torch.testing.assert_close(got, logits, atol=1e-4, rtol=1e-4)


@dtypes
@pytest.mark.parametrize("family", SWAPPED)
def test_fusion_replaces_the_expected_modules(family: str, dtype: torch.dtype) -> None:
    model, lines = prepared(tiny_model(family).to(dtype)), list[str]()
    assert fuse(model, layout_of(model), MAX_MODEL_LEN, lines.append)
    assert swapped(model) == SWAPPED[family]
    assert lines == []


def test_kernels_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(kv_cache, "rotary_write", fail)
    monkeypatch.setattr(fused_modules, "silu_mul", fail)
    model, lines = prepared(tiny_model("llama")), list[str]()
    assert fuse(model, layout_of(model), MAX_MODEL_LEN, lines.append)
    reason = "because the fused module failed: RuntimeError: out of resource: shared memory"
    assert lines == [
        f"{kind} modules are not fused, {reason}" for kind in ("LlamaAttention", "LlamaMLP")
    ]
    assert fused_line(model) == "fused modules: 7 x norm, 3 x layer"


def test_parameters_are_stored_once() -> None:
    model = prepared(tiny_model("qwen2"))
    before = sum(parameter.numel() for parameter in model.parameters())
    fuse(model, layout_of(model), MAX_MODEL_LEN)
    assert sum(parameter.numel() for parameter in model.parameters()) == before


def fused_is_close(family: str, dtype: torch.dtype, change: Callable[[Any], None]) -> Any:
    """Change a model, fuse it, and check that fusion adds little to the error of its logits."""
    model: Any = prepared(tiny_model(family))
    change(model)
    layout = layout_of(model)
    step = probe_step(range(3, 63), layout)
    exact, plain = (
        logits_of(copy.deepcopy(model).to(kind), step) for kind in (torch.float32, dtype)
    )
    assert fuse(model.to(dtype), layout_of(model), MAX_MODEL_LEN)
    plain_error, error = ((got - exact).norm() for got in (plain, logits_of(model, step)))
    assert error <= 1.3 * plain_error + 1e-3 * exact.norm()
    return model


def logits_of(model: Any, step: Step) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    cache = KVCache(layout_of(model), step.block_tables.size, torch.device("cpu"), dtype)
    return forward(model, cache, make_backend(cache), step).float()


@dtypes
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "llama", "qwen3", "olmo2"])
def test_fusion_with_norm_weights_of_trained_models(family: str, dtype: torch.dtype) -> None:
    """Some norm weights are very large, because some activations differ only at large gates."""

    def change(model: Any) -> None:
        torch.manual_seed(1)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data.uniform_(0, 4)
                weight.data[::8] = 30

    fused_is_close(family, dtype, change)


@dtypes
@pytest.mark.parametrize("limit", [0.5, 5.0, 50.0, 1000.0])
def test_attention_that_clips_is_not_fused(limit: float, dtype: torch.dtype) -> None:
    """Only large values reveal that attention clips, as OLMo's does with ``clip_qkv``."""

    class Clipped(LlamaAttention):
        def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
            return super().forward(hidden_states.clamp(-limit, limit), **options)

    def change(model: Any) -> None:
        model.model.layers[1].self_attn.__class__ = Clipped

    assert swapped(fused_is_close("llama", dtype, change)) == (2, 3, 7)


def test_attention_that_differs_at_late_positions_is_not_fused() -> None:
    """Llama 4, for example, scales its queries from some position on."""
    model: Any = prepared(tiny_model("llama"))
    last = model.model.rotary_emb(torch.zeros(1, 1, 32), torch.tensor([[MAX_MODEL_LEN - 1]]))[0]

    class ScaledLate(LlamaAttention):
        def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
            is_last = (options["position_embeddings"][0] == last).all(dim=-1, keepdim=True)
            return super().forward(hidden_states * (1 + 0.1 * is_last), **options)

    model.model.layers[1].self_attn.__class__ = ScaledLate
    fuse(model, layout_of(model), MAX_MODEL_LEN)
    assert swapped(model) == (2, 3, 7)


def test_mlp_with_another_activation_is_not_fused() -> None:
    model = prepared(tiny_model("llama", hidden_act="gelu"))
    fuse(model, layout_of(model), MAX_MODEL_LEN)
    assert swapped(model) == (3, 0, 7)


def test_norm_that_computes_more_is_not_fused() -> None:
    model = prepared(tiny_model("llama"))
    norm: Any = model.model.norm  # type: ignore[union-attr]
    original = norm.forward
    norm.forward = lambda x: original(x) + 1
    fuse(model, layout_of(model), MAX_MODEL_LEN)
    assert swapped(model) == (3, 3, 6)


def test_norm_in_another_precision_is_not_fused() -> None:
    model = prepared(tiny_model("llama").bfloat16())
    model.model.norm.float()  # type: ignore[union-attr]
    model.lm_head.float()
    fuse(model, layout_of(model), MAX_MODEL_LEN)
    assert swapped(model) == (3, 3, 6)
