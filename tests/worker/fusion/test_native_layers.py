"""Decoder layers that run in one C call give the same logits as transformers."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.kernels.cpu import compiled_library, decoder_layer
from batchinfer.worker.attention.attention import ATTENTION_NAME, make_backend, register
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion import native_layers
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.fusion.native_layers import (
    NativeDecoderLayers,
    fuse_native_layers,
    join_native_layers,
)
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear.packed_linear import pack_linears, quantize_packed
from batchinfer.worker.linear_kernels import linear_kernels
from tests.models import VOCAB_SIZE, tiny_model
from tests.worker.fusion.test_layers import ATTENTION_ALONE
from tests.worker.step_maker import StepMaker

pytestmark = pytest.mark.skipif(
    not decoder_layer.supports(torch.float32), reason="not supported on this processor"
)

LENGTHS = (40, 25)
PARTS = (
    *(("rms_norm", "attention_norm"), ("gemm", "qkv"), ("rotary_write", "rotary")),
    *(("attend", "attention"), ("sigmoid_mul", "gate"), ("gemm", "o"), ("rms_norm", "mlp_norm")),
    *(("gemm", "gate_up"), ("silu_mul", "silu"), ("gemm", "down")),
)
"""Pairs of a C function and a group of a layer's arguments, in the order of the calls."""
JOINED = pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])


def fused(
    family: str,
    *,
    joined: bool = False,
    dtype: torch.dtype = torch.float32,
    method: str = "",
    **changes: Any,
) -> tuple[torch.nn.Module, KVLayout]:
    """Return a model with packed weights whose layers run in C calls.

    Args:
        joined: one call runs all layers; otherwise each layer has its own call.
        method: quantization method; empty for none.
    """
    register()
    model = tiny_model(family, **changes).to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    config: Any = model.config
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout.from_config(config.to_dict(), block_size=16, dtype=name)
    fuse(model, layout, 512)
    if method:
        quantize_packed(model, method, dtype)
    else:
        pack_linears(model, linear_kernels(dtype)[0], dtype)
    fuse_native_layers(model, layout)
    if joined:
        join_native_layers(model, layout)
    return model, layout


class Run:
    """Two sequences in one KV pool, and transformers' logits for all their positions."""

    def __init__(
        self, family: str, layout: KVLayout, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> None:
        rng = np.random.default_rng(0)
        ids = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in LENGTHS]
        self.cache = KVCache(layout, 8, torch.device("cpu"), dtype)
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
    """Return the number of layers of each call."""
    modules = [module for module in model.modules() if isinstance(module, NativeDecoderLayers)]
    return [len(module.layers) for module in modules]


@JOINED
@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", 3),
        ("qwen2", 3),  # biases
        ("qwen3", 3),  # head norms
        ("mistral", 3),  # a window
        ("gemma2", 0),  # norms after the products
        ("granite", 0),  # scales the outputs that it adds to the residual
        ("qwen3_moe", 0),
        ("gpt2", 0),
    ],
)
def test_logits_still_equal_transformers(family: str, count: int, joined: bool) -> None:
    """Steps grow, shrink, and repeat the length of the previous step with other sequences."""
    model, layout = fused(family, joined=joined)
    assert calls(model) == ([count] if joined and count else [1] * count)
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


def test_joined_layers_know_what_tokens_of_an_image_see() -> None:
    ends = np.maximum(np.arange(1, 41), np.where(np.arange(40) // 20 == 1, 40, 0)).astype(np.int32)
    joined, layout = fused("mistral", joined=True)
    plain: Any = tiny_model("mistral")
    plain.set_attn_implementation(ATTENTION_NAME)
    logits = []
    for model in (joined, plain):
        run = Run("mistral", layout)
        step = replace(run.maker.step([(run.first, 40)], every_logit=True), query_ends=ends)
        logits.append(forward(model, run.cache, make_backend(run.cache), step))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def _turn_from(place: int) -> Any:
    """Return a hook that changes a layer's rotary angles from position ``place`` on."""

    def turn(layer: Any, arguments: Any, options: Any) -> tuple[Any, Any]:
        cos, sin = (part.clone() for part in options["position_embeddings"])
        sin[:, place:] *= -1
        return arguments, options | {"position_embeddings": (cos, sin)}

    return turn


@pytest.mark.parametrize("place", [0, 8], ids=["at once", "late"])
def test_layers_with_different_rotary_angles_stay_apart(place: int) -> None:
    """This holds even if the angles differ only at positions that no trial run covers."""
    model, layout = fused("llama")
    body: Any = model.model
    body.layers[1].register_forward_pre_hook(_turn_from(place), with_kwargs=True)
    join_native_layers(model, layout)
    assert calls(model) == [1, 1, 1]


@pytest.mark.parametrize("error", [IndexError, KeyError, ValueError])
def test_layers_that_the_model_counts_stay_apart(error: type[Exception]) -> None:
    def count(body: Any, _: Any) -> None:
        if len(body.layers) != 3:
            raise error

    model, layout = fused("llama")
    body: Any = model.model
    body.register_forward_pre_hook(count)
    join_native_layers(model, layout)
    assert calls(model) == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_with_and_without_a_window_are_joined(dtype: torch.dtype) -> None:
    """``tests/test_sliding_windows.py`` tests models with two layer groups."""
    if not decoder_layer.supports(dtype):
        pytest.skip("not supported on this processor")
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    changes: dict[str, Any] = {"layer_types": types, "use_sliding_window": True}
    changes["sliding_window"] = 16
    logits = []
    for joined in (False, True):
        model, layout = fused("qwen2", joined=joined, dtype=dtype, **changes)
        assert calls(model) == ([3] if joined else [1, 1, 1])
        run = Run("qwen2", layout, dtype, **changes)
        steps = [run.logits(model, (run.first, count)) for count in (30, 1, 9)]
        logits.append(torch.cat(steps))
    assert torch.equal(*logits)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    off = (logits[0].float() - run.expected[0]).norm() / run.expected[0].norm()
    assert off < tolerance


@JOINED
@pytest.mark.parametrize("room", [0, 1, 16])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen3", {"num_attention_heads": 64, "intermediate_size": 1024})],
    ids=["dense", "padded"],  # rows of 1024 floats are padded
)
def test_steps_grow_after_a_first_step_of_one_token(
    family: str, changes: dict[str, int], room: int, joined: bool
) -> None:
    """The workspace starts with room for ``room`` tokens."""
    model, layout = fused(family, joined=joined, **changes)
    workspace = next(x for x in model.modules() if isinstance(x, NativeDecoderLayers)).workspace
    workspace.release()
    workspace.reserve(room)
    run = Run(family, layout, **changes)
    for start, count in ((0, 1), (1, 2), (3, 3), (6, 4)):
        got = run.logits(model, (run.first, count))
        expected = run.expected[0][start : start + count]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@JOINED
@pytest.mark.parametrize("counts", [(4,), (1, 4)], ids=str)
def test_steps_continue_after_a_step_failed_in_the_middle(
    counts: tuple[int, ...], joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the call fails, later layers have not yet seen that the workspace moved."""
    model, layout = fused("llama", joined=joined)
    run = Run("llama", layout)
    run.logits(model, (run.first, 4))
    with monkeypatch.context() as patch:
        patch.setattr(native_layers, "decoder_layers", _no_memory)
        with pytest.raises(MemoryError):
            run.logits(model, (run.second, 20))
    got = torch.cat([run.logits(model, (run.first, count)) for count in counts])
    torch.testing.assert_close(got, run.expected[0][4 : 4 + len(got)], atol=1e-4, rtol=1e-4)
    layers = [module for module in model.modules() if isinstance(module, NativeDecoderLayers)]
    assert len({part.qkv.out for layer in layers for part in layer._arguments}) == 1


def test_the_workspace_holds_rows_of_each_product_of_a_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The products of a layer share one buffer, so the widest must fit."""
    widths = {"head_dim": 256, "intermediate_size": 16}  # attention's output is the widest
    model, layout = fused("mistral", joined=True, method="int8", **widths)
    run = Run("mistral", layout, **widths)
    tokens: list[int] = []
    monkeypatch.setattr(native_layers, "decoder_layers", partial(_both_ways, tokens))
    run.logits(model, (run.first, 39), (run.second, 23))
    assert tokens == [62]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("method", ["", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("mistral", {}), ("qwen3_5_text", ATTENTION_ALONE)],
    ids=["mistral", "gated"],
)
def test_joined_layers_have_the_bits_of_separate_calls(
    family: str,
    changes: dict[str, Any],
    dtype: torch.dtype,
    method: str,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run few tokens and many tokens, because different functions round them to int8.

    Threads must wait for each other where one function reads what another wrote.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model, layout = fused(family, joined=True, dtype=dtype, method=method, **changes)
    run = Run(family, layout, dtype, **changes)
    tokens: list[int] = []
    monkeypatch.setattr(native_layers, "decoder_layers", partial(_both_ways, tokens))
    for parts in (((run.first, 1),), ((run.first, 39), (run.second, 23)), ((run.second, 2),)):
        run.logits(model, *parts)
    assert tokens == [1, 62, 2]


def _both_ways(tokens: list[int], layers: Any, steps: Any, dtype: torch.dtype) -> None:
    step, product = steps[0].contents, layers[0].qkv
    size = step.num_tokens * product.in_features * dtype.itemsize
    hidden = (ctypes.c_char * size).from_address(step.hidden)
    before = hidden.raw
    decoder_layer.decoder_layers(layers, steps, dtype)
    together, hidden.raw = hidden.raw, before
    for layer in layers:
        for function, part in PARTS:
            if part == "gate" and not layer.gate.gate:
                continue  # attention without output gates
            call = getattr(compiled_library.load(), f"{function}_{compiled_library.SUFFIX[dtype]}")
            call(ctypes.byref(getattr(layer, part)))
    assert hidden.raw == together
    tokens.append(step.num_tokens)


def _no_memory(*_: Any) -> None:
    raise MemoryError


@JOINED
def test_layers_use_the_pool_of_each_step(joined: bool) -> None:
    model, layout = fused("llama", joined=joined)
    for _ in range(2):
        run = Run("llama", layout)
        got = run.logits(model, (run.first, 7))
        torch.testing.assert_close(got, run.expected[0][:7], atol=1e-4, rtol=1e-4)


@JOINED
def test_float8_pool_runs_python_layers(joined: bool) -> None:
    model, layout = fused("llama", joined=joined)
    layout = replace(layout, fp8=True)
    run = Run("llama", layout)
    run.cache = KVCache(layout, 8, torch.device("cpu"), torch.float8_e4m3fn)
    got = run.logits(model, (run.first, 7))
    assert (got - run.expected[0][:7]).abs().max() < 0.5


def test_without_the_kernels_nothing_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_layers, "supports", lambda dtype: False)
    assert calls(fused("llama")[0]) == []
