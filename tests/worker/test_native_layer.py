"""Decoder layers as one C call: transformers' logits, whatever the steps before were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.engine.layout import KVLayout
from batchinfer.kernels.cpu import decoder_layer
from batchinfer.worker import native_layer
from batchinfer.worker.attention import ATTENTION_NAME, make_backend, register
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion import fuse
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear import pack_linears
from batchinfer.worker.native_layer import (
    NativeDecoderLayers,
    fuse_native_layers,
    join_native_layers,
)
from tests.models import VOCAB_SIZE, tiny_model
from tests.worker.step_maker import StepMaker

pytestmark = pytest.mark.skipif(
    not decoder_layer.supports(torch.float32), reason="not on this processor"
)

LENGTHS = (40, 25)


def fused(family: str, **changes: Any) -> tuple[torch.nn.Module, KVLayout, int]:
    """A model with packed weights, and how many of its layers became one call."""
    register()
    model = tiny_model(family, **changes)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    config: Any = model.config
    layout = KVLayout.from_config(config.to_dict(), block_size=16, dtype="float32")
    fuse(model, layout, 512)
    pack_linears(model, torch.float32)
    return model, layout, fuse_native_layers(model, layout)


class Run:
    """Two sequences over one pool, and what transformers makes of the first's every position."""

    def __init__(self, family: str, layout: KVLayout, **changes: Any) -> None:
        rng = np.random.default_rng(0)
        ids = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in LENGTHS]
        self.cache = KVCache(layout, 8, torch.device("cpu"), torch.float32)
        self.maker = StepMaker(8, 16)
        self.first, self.second = map(self.maker.sequence, ids)
        with torch.inference_mode():
            self.expected = [
                tiny_model(family, **changes)(
                    input_ids=torch.tensor([row]), use_cache=False
                ).logits[0]
                for row in ids
            ]

    def logits(self, model: torch.nn.Module, *parts: tuple[Any, int]) -> torch.Tensor:
        step = self.maker.step(list(parts), every_logit=True)
        return forward(model, self.cache, make_backend(self.cache), step)


def calls(model: torch.nn.Module) -> list[int]:
    """How many layers each call computes."""
    modules = [module for module in model.modules() if isinstance(module, NativeDecoderLayers)]
    return [len(module.layers) for module in modules]


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", 3),
        ("qwen2", 3),  # biases
        ("qwen3", 3),  # head norms
        ("mistral", 3),  # a window
        ("gemma2", 0),  # norms after the products
        ("granite", 0),  # scales what it adds
        ("qwen3_moe", 0),
        ("gpt2", 0),
    ],
)
def test_logits_stay_those_of_transformers(family: str, count: int, joined: bool) -> None:
    """In steps that grow, shrink and are as long as the one before, of other sequences."""
    model, layout, swapped = fused(family)
    assert swapped == count
    assert calls(model) == [1] * count
    if joined:
        join_native_layers(model, layout)
        assert calls(model) == ([count] if count else [])
    run = Run(family, layout)
    a, b = run.expected
    for got, expected in (
        (run.logits(model, (run.first, 5)), a[:5]),
        (run.logits(model, (run.second, 5)), b[:5]),
        (run.logits(model, (run.first, 33), (run.second, 19)), torch.cat((a[5:38], b[5:24]))),
        (run.logits(model, (run.first, 1), (run.second, 1)), torch.stack((a[38], b[24]))),
        (run.logits(model, (run.first, 1)), a[39:40]),
    ):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def _turns_layers_differently(layers: Any) -> None:
    """As models do that turn some of them by other angles."""
    forward_of_second = layers[1].forward

    def turned(hidden: torch.Tensor, *, position_embeddings: Any, **options: Any) -> torch.Tensor:
        cos, sin = position_embeddings
        out: torch.Tensor = forward_of_second(hidden, position_embeddings=(cos, -sin), **options)
        return out

    layers[1].forward = turned


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_that_are_called_differently_stay_apart(family: str) -> None:
    model, layout, _ = fused(family)
    body: Any = model.model  # type: ignore[union-attr]
    _turns_layers_differently(body.layers)
    before = Run(family, layout)
    expected = before.logits(model, (before.first, 9))
    join_native_layers(model, layout)
    assert calls(model) == [1, 1, 1]
    after = Run(family, layout)
    assert torch.equal(after.logits(model, (after.first, 9)), expected)


def test_layers_that_the_model_looks_at_stay_apart() -> None:
    model, layout, _ = fused("llama")
    body: Any = model.model
    body.register_forward_pre_hook(lambda module, _: (module.layers[2], None)[1])
    join_native_layers(model, layout)
    assert calls(model) == [1, 1, 1]


def test_layers_with_and_without_a_window_are_one_call() -> None:
    """Such of two layer groups: ``tests/test_windows.py``."""
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    changes: dict[str, Any] = {"layer_types": types, "use_sliding_window": True}
    changes["sliding_window"] = 16
    model, layout, _ = fused("qwen2", **changes)
    logits = []
    for join in (False, True):
        if join:
            join_native_layers(model, layout)
        run = Run("qwen2", layout, **changes)
        steps = [run.logits(model, (run.first, count)) for count in (30, 1, 9)]
        logits.append(torch.cat(steps))
    assert calls(model) == [3]
    assert torch.equal(*logits)
    torch.testing.assert_close(logits[0], run.expected[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("room", [0, 1, 16])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen3", {"num_attention_heads": 64, "intermediate_size": 1024})],
    ids=["dense", "padded"],  # rows of 1024 floats are kept apart
)
def test_steps_over_a_pool_whose_first_was_of_a_single_token(
    family: str, changes: dict[str, int], room: int
) -> None:
    """In a workspace that has room for so many tokens."""
    model, layout, _ = fused(family, **changes)
    workspace = next(x for x in model.modules() if isinstance(x, NativeDecoderLayers)).workspace
    workspace.release()
    workspace.reserve(room)
    run = Run(family, layout, **changes)
    for start, count in ((0, 1), (1, 2), (3, 3), (6, 4)):
        got = run.logits(model, (run.first, count))
        expected = run.expected[0][start : start + count]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("counts", [(4,), (1, 4)], ids=str)
def test_steps_go_on_after_one_that_failed_in_the_middle(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later layers have not seen that the workspace moved."""
    model, layout, _ = fused("llama")
    run = Run("llama", layout)
    run.logits(model, (run.first, 4))
    with monkeypatch.context() as patch:
        patch.setattr(native_layer, "decoder_layers", _no_memory)
        with pytest.raises(MemoryError):
            run.logits(model, (run.second, 20))
    got = torch.cat([run.logits(model, (run.first, count)) for count in counts])
    torch.testing.assert_close(got, run.expected[0][4 : 4 + len(got)], atol=1e-4, rtol=1e-4)
    layers = [module for module in model.modules() if isinstance(module, NativeDecoderLayers)]
    assert len({layer._arguments[0].qkv.out for layer in layers}) == 1


def _no_memory(*_: Any) -> None:
    raise MemoryError


def test_another_pool_is_another_address() -> None:
    model, layout, _ = fused("llama")
    for _ in range(2):
        run = Run("llama", layout)
        got = run.logits(model, (run.first, 7))
        torch.testing.assert_close(got, run.expected[0][:7], atol=1e-4, rtol=1e-4)


def test_a_pool_of_float8_is_left_to_the_layer() -> None:
    model, layout, _ = fused("llama")
    layout = replace(layout, fp8=True)
    run = Run("llama", layout)
    run.cache = KVCache(layout, 8, torch.device("cpu"), torch.float8_e4m3fn)
    got = run.logits(model, (run.first, 7))
    assert (got - run.expected[0][:7]).abs().max() < 0.5


def test_without_the_kernels_nothing_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_layer, "supports", lambda dtype: False)
    assert fused("llama")[2] == 0
