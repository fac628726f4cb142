"""Fused modules: they take the place of what they compute the same as, and of nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchinfer.engine.layout import KVLayout
from batchinfer.kernels.cpu import native
from batchinfer.worker.attention import ATTENTION_NAME, make_backend, register
from batchinfer.worker.forward import forward
from batchinfer.worker.fused_modules import FusedAttention, FusedGatedMLP, FusedRMSNorm
from batchinfer.worker.fusion import fuse
from batchinfer.worker.kv_cache import KVCache
from tests.models import FAMILIES, VOCAB_SIZE, tiny_model
from tests.worker.step_maker import StepMaker

MAX_MODEL_LEN = 512
SWAPPED = {  # three layers each: attention, gated MLPs, norms
    "llama": (3, 3, 7),
    "qwen2": (3, 3, 7),
    "qwen3": (3, 3, 7),
    "mistral": (3, 3, 7),
    "granite": (3, 3, 7),
    "gemma2": (3, 0, 13),  # its MLPs have another activation
    "qwen3_moe": (3, 0, 7),
    "gpt_oss": (0, 0, 7),  # its rotary positions come as half a head
    "gpt2": (0, 0, 0),
}


@pytest.fixture(autouse=True, params=["native", "torch"])
def cpu_operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the C kernels, and with their twins."""
    if request.param == "torch":
        monkeypatch.setattr(native, "supports", lambda dtype: False)


def layout_of(model: Any) -> KVLayout:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return KVLayout.from_config(model.config.to_dict(), block_size=16, dtype=dtype)


def prepared(model: nn.Module) -> nn.Module:
    register()
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    return model


def swapped(model: nn.Module) -> tuple[int, int, int]:
    kinds = Counter(type(module) for module in model.modules())
    return kinds[FusedAttention], kinds[FusedGatedMLP], kinds[FusedRMSNorm]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_those_of_transformers(family: str) -> None:
    """Prefill, then a chunk beside a decode, over a pool full of NaN."""
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
    expected = (
        torch.cat([eager[0][:39], eager[1][:9]]),
        torch.cat([eager[1][9:], eager[0][39:]]),
    )
    fuse(prepared(model), layout_of(model), MAX_MODEL_LEN)
    cache = KVCache(layout_of(model), 64, torch.device("cpu"), torch.float32)
    cache.pool[:64] = torch.nan
    for step, logits in zip(steps, expected, strict=True):
        got = forward(model, cache, make_backend(cache), step)
        torch.testing.assert_close(got, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", SWAPPED)
def test_what_is_swapped(family: str, dtype: torch.dtype) -> None:
    model = prepared(tiny_model(family).to(dtype))
    count = fuse(model, layout_of(model), MAX_MODEL_LEN)
    assert swapped(model) == SWAPPED[family]
    assert count == sum(SWAPPED[family])


def test_parameters_are_held_once() -> None:
    model = prepared(tiny_model("qwen2"))
    before = sum(parameter.numel() for parameter in model.parameters())
    fuse(model, layout_of(model), MAX_MODEL_LEN)
    assert sum(parameter.numel() for parameter in model.parameters()) == before


def test_attention_that_differs_at_late_positions_only_is_left_alone() -> None:
    """As Llama 4's, which scales its queries from some position on."""
    model = prepared(tiny_model("llama"))
    rotary = model.model.rotary_emb  # type: ignore[union-attr]
    attention: Any = model.model.layers[1].self_attn  # type: ignore[union-attr, index]
    original = attention.forward

    def scaled_late(hidden_states: torch.Tensor, position_embeddings: Any, **options: Any) -> Any:
        late = position_embeddings[0] != rotary(hidden_states, torch.tensor([[0, 1, 256, 256]]))[0]
        return original(
            hidden_states + 0.5 * late.any(-1, keepdim=True),
            position_embeddings=position_embeddings,
            **options,
        )

    attention.forward = scaled_late
    fuse(model, layout_of(model), MAX_MODEL_LEN)
    assert swapped(model) == (2, 3, 7)


def test_another_activation_is_left_alone() -> None:
    model = prepared(tiny_model("llama", hidden_act="gelu"))
    fuse(model, layout_of(model), MAX_MODEL_LEN)
    assert swapped(model) == (3, 0, 7)


def test_a_norm_that_does_more_is_left_alone() -> None:
    model = prepared(tiny_model("llama"))
    norm: Any = model.model.norm  # type: ignore[union-attr]
    original = norm.forward
    norm.forward = lambda x: original(x) + 1
    fuse(model, layout_of(model), MAX_MODEL_LEN)
    assert swapped(model) == (3, 3, 6)


def test_a_norm_kept_in_another_precision_is_left_alone() -> None:
    model = prepared(tiny_model("llama").bfloat16())
    model.model.norm.float()  # type: ignore[union-attr]
    model.lm_head.float()
    fuse(model, layout_of(model), MAX_MODEL_LEN)
    assert swapped(model) == (3, 3, 6)
