"""Fused decoder layers give the same logits as transformers and launch few kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.attention.attention import ATTENTION_NAME, make_backend, register
from batchinfer.worker.attention.cuda import CudaAttention
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.fusion.fused_modules import FusedDecoderLayer
from batchinfer.worker.fusion.gated_delta_net import FusedGatedDeltaNet
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.lora.lora_layers import _current_module
from batchinfer.worker.recurrent.patch_layers import page_recurrent_state
from tests.models import VOCAB_SIZE, tiny_model
from tests.worker.on_triton import pretend_cuda, traced
from tests.worker.step_maker import StepMaker

NUM_SLOTS = 64
ATTENTION_ALONE = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}


def fused(
    family: str, dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[torch.nn.Module, KVLayout, int]:
    """Return a fused model, its layout, and the number of its fused layers."""
    register()
    model = tiny_model(family, **changes).to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    page_recurrent_state(model)
    config: Any = model.config
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout.from_config(config.to_dict(), block_size=16, dtype=name)
    assert fuse(model, layout, 512)
    return model, layout, sum(isinstance(module, FusedDecoderLayer) for module in model.modules())


def prefill_and_decode(layout: KVLayout) -> tuple[KVCache, list[Any], list[list[int]]]:
    """Return a pool, steps of a chunked prefill and a decode, and the ids of both sequences."""
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, (2, 20)).tolist()
    cache = KVCache(layout, NUM_SLOTS, torch.device("cpu"), torch.float32)
    maker = StepMaker(
        NUM_SLOTS, 16, slots_per_state=layout.slots_per_state, attends=bool(layout.windows)
    )
    first, second = map(maker.sequence, ids)
    parts = [(first, 19), (second, 7)], [(second, 12)], [(first, 1), (second, 1)]
    return cache, [maker.step(part, every_logit=True) for part in parts], ids


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", 3),
        ("qwen2", 3),
        ("qwen3", 3),
        ("mistral", 3),
        ("qwen3_5_text", 3),  # gates between the query heads
        ("gemma2", 0),  # norms after the products
        ("granite", 0),  # scales the outputs that it adds to the residual
        ("qwen3_moe", 0),
        ("gpt2", 0),
    ],
)
def test_logits_still_equal_transformers(family: str, count: int) -> None:
    changes = ATTENTION_ALONE if family == "qwen3_5_text" else {}
    model, layout, swapped = fused(family, **changes)
    assert swapped == count
    cache, steps, ids = prefill_and_decode(layout)
    with torch.inference_mode():
        expected = tiny_model(family, **changes)(
            input_ids=torch.tensor(ids), use_cache=False
        ).logits
    for step in steps:
        got = forward(model, cache, make_backend(cache), step)
    torch.testing.assert_close(got, expected[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_that_scales_its_sum_is_not_fused_in_16_bits(dtype: torch.dtype) -> None:
    assert fused("granite", dtype, residual_multiplier=0.99)[2] == 0
    assert fused("llama", dtype)[2] == 3


def test_layer_that_scales_its_sum_is_not_fused() -> None:
    model, layout, swapped = fused("granite", residual_multiplier=0.99)
    assert swapped == 0
    cache, steps, _ = prefill_and_decode(layout)
    assert forward(model, cache, make_backend(cache), steps[0]).isfinite().all()


def test_layers_are_not_fused_without_finite_logits() -> None:
    register()
    model: Any = tiny_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    model.lm_head.weight.data[:, 0] = torch.nan
    layout = KVLayout.from_config(model.config.to_dict(), block_size=16, dtype="float32")
    assert fuse(model, layout, 512)
    assert not any(isinstance(module, FusedDecoderLayer) for module in model.modules())


def launches(
    monkeypatch: pytest.MonkeyPatch, family: str = "qwen3", **changes: Any
) -> Counter[str]:
    """Count the launches of each kernel in a decode step of two sequences, and compare its logits
    with those of transformers."""
    model, layout, _ = fused(family, **changes)
    cache, steps, ids = prefill_and_decode(layout)
    for step in steps[:-1]:
        forward(model, cache, CudaAttention(cache), step)
    with traced(monkeypatch) as trace:
        got = forward(model, cache, CudaAttention(cache), steps[-1])
    with torch.inference_mode():
        expected = tiny_model(family, **changes)(input_ids=torch.tensor(ids), use_cache=False)
    torch.testing.assert_close(got, expected.logits[:, -1], atol=1e-4, rtol=1e-4)
    return Counter(trace.names)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_decode_layer_launches_nine_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """If contexts can be longer than one piece, `_merge_kernel` is a tenth kernel."""
    pretend_cuda(monkeypatch)
    layer = launches(monkeypatch, num_hidden_layers=3) - launches(monkeypatch, num_hidden_layers=2)
    assert layer == {
        "_rms_norm_kernel": 2,
        "linear": 2,
        "_rotary_write_kernel": 1,
        "_decode_kernel": 1,
        "addmm_": 2,
        "_silu_mul_kernel": 1,
    }
    assert layer.total() == 9


FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
LAUNCHES: dict[tuple[str, str], int] = {
    ("qwen3_moe", ""): 12,
    ("mixtral", ""): 12,
    ("gpt_oss", SLIDING): 13,
    ("phi3", ""): 11,
    ("olmo2", ""): 11,
    ("cohere", ""): 10,
    ("cohere2", SLIDING): 10,
    ("qwen3_next", LINEAR): 14,
    ("qwen3_next", FULL): 14,
    ("qwen3_5_moe_text", LINEAR): 14,
    ("qwen3_5_moe_text", FULL): 14,
}
"""Launches of a layer of a type in a decode step, as in ``kernels/README.md``."""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("family", "kind"), LAUNCHES)
def test_launches_of_a_decode_layer(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cuda(monkeypatch)
    few: dict[str, Any] = {"num_hidden_layers": 1}
    more: dict[str, Any] = {"num_hidden_layers": 2}
    if kind:
        kinds = [LINEAR, FULL] if "qwen" in family else [kind]
        few = {"num_hidden_layers": len(kinds), "layer_types": kinds}
        more = {"num_hidden_layers": len(kinds) + 1, "layer_types": [*kinds, kind]}
    layer = launches(monkeypatch, family, **more) - launches(monkeypatch, family, **few)
    assert layer.total() == LAUNCHES[family, kind], layer


def test_projections_ordered_by_key_head_keep_their_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adapters of these projections need the order of the outputs of the merged projection."""
    pretend_cuda(monkeypatch)
    layer: Any = tiny_model("qwen3_next").get_submodule("model.layers.0.linear_attn")
    parent = nn.ModuleDict({"attention": FusedGatedDeltaNet(layer)})
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    for name in ("in_proj_qkvz", "in_proj_ba"):
        merged, start, order = _current_module(parent, f"attention.{name}")
        assert order is not None
        outputs = merged(x)[:, start : start + len(order)]
        torch.testing.assert_close(outputs, getattr(layer, name)(x)[:, order])
        assert not torch.equal(order, order.sort().values)
