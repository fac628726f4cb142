"""Attention of each family on a CPU equals transformers' eager attention in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.engine.images import Image, PromptImage, query_ends
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.kernels import reference
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.worker.attention.attention import (
    ATTENTION_NAME,
    UnsupportedAttentionError,
    make_backend,
    paged_attention_forward,
    register,
)
from batchinfer.worker.attention.native_cpu import NativeAttention
from batchinfer.worker.attention.temperature import temper_queries
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from tests.models import FAMILIES, VOCAB_SIZE, tiny_model
from tests.worker.step_maker import HandSequence, StepMaker

TOLERANCE = 1e-4


@pytest.fixture(autouse=True, params=["native", "torch"])
def cpu_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with the C kernels and with torch; without a C compiler, both runs use torch."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_attention, "supports", lambda dtype: False)


class Parity:
    """Two copies of a model: one runs in transformers, one in a KV pool that is filled with NaN."""

    def __init__(
        self, family: str, block_size: int, dtype: torch.dtype = torch.float32, *, fp8: bool = False
    ) -> None:
        register()
        num_blocks = 256
        self.reference, self.model = (tiny_model(family).to(dtype) for _ in range(2))
        self.model.set_attn_implementation(ATTENTION_NAME)
        temper_queries(self.model)
        layout = KVLayout.from_config(
            self.model.config.to_dict(),
            block_size=block_size,
            dtype=str(dtype).removeprefix("torch."),
            kv_cache_dtype="fp8" if fp8 else "auto",
        )
        cache = KVCache(layout, num_blocks, torch.device("cpu"), dtype)
        cache.pool[:num_blocks] = float("nan")
        self.cache, self.backend = cache, make_backend(cache)
        self.maker = StepMaker(num_blocks, block_size)

    def sequences(self, *lengths: int) -> list[HandSequence]:
        rng = np.random.default_rng(1)
        return [self.maker.sequence(rng.integers(0, VOCAB_SIZE, n).tolist()) for n in lengths]

    def eager(self, sequence: HandSequence) -> torch.Tensor:
        """Return logits [T, vocabulary] of all computed tokens of a sequence."""
        with torch.inference_mode():
            ids = torch.tensor([sequence.token_ids[: sequence.num_computed]])
            return self.reference(input_ids=ids, use_cache=False).logits[0]

    def step(
        self, parts: list[tuple[HandSequence, int]], copies: tuple[tuple[int, int], ...] = ()
    ) -> torch.Tensor:
        """Run one step; return the logits of all its tokens."""
        step = self.maker.step(parts, copies=copies, every_logit=True)
        return forward(self.model, self.cache, self.backend, step)

    def check(
        self, parts: list[tuple[HandSequence, int]], copies: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """Run one step and compare all its logits."""
        got = self.step(parts, copies)
        expected = torch.cat([self.eager(sequence)[-count:] for sequence, count in parts])
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_match_eager(family: str) -> None:
    parity = Parity(family, block_size=16)
    short, middle, long = parity.sequences(4, 23, 81)
    parity.check([(long, 78), (short, 1), (middle, 20)])
    for _ in range(3):
        parity.check([(short, 1), (middle, 1), (long, 1)])


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_seven_match_eager(family: str) -> None:
    parity = Parity(family, block_size=16)
    decoding, chunked = parity.sequences(32, 30)
    parity.check([(decoding, 27)])
    for _ in range(4):
        parity.check([(chunked, 7), (decoding, 1)])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("block_size", [1, 32])
def test_other_block_sizes_match_eager(family: str, block_size: int) -> None:
    parity = Parity(family, block_size)
    first, second = parity.sequences(70, 33)
    parity.check([(first, 66), (second, 9)])
    parity.check([(second, 23), (first, 1)])
    parity.check([(second, 1), (first, 1)])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text"])
@pytest.mark.parametrize("block_size", [5, 16])
def test_tokens_of_an_image_see_each_other(family: str, block_size: int) -> None:
    """An image is longer than a tile of queries, and begins outside the windows of its last
    tokens."""
    parity = Parity(family, block_size)
    (sequence,) = parity.sequences(120)
    images = [Image(0, dict, n, attends_both_ways=True) for n in (20, 70)]
    placed = tuple(
        PromptImage(image, np.arange(first, first + image.num_tokens, dtype=np.int32))
        for image, first in zip(images, (3, 30), strict=True)
    )
    ends = torch.from_numpy(query_ends(placed, 0, 120))
    places = torch.arange(120)
    seen = places < ends[:, None]
    window = places[:, None] - places < getattr(parity.reference.config, "sliding_window", 120)
    masks = {"full_attention": seen, "sliding_attention": seen & window}
    if family == "gemma4_text":  # its layers with full attention are causal
        masks["full_attention"] = places <= places[:, None]
    masks = {name: torch.where(mask, 0.0, -torch.inf)[None, None] for name, mask in masks.items()}
    with torch.inference_mode():
        expected = parity.reference(
            input_ids=torch.tensor([sequence.token_ids]),
            attention_mask=masks["full_attention"] if family == "llama" else masks,
            use_cache=False,
        ).logits[0]
    for count in (25, 90, 5):
        start = sequence.num_computed
        step = parity.maker.step([(sequence, count)], every_logit=True)
        step = replace(step, query_ends=query_ends(placed, start, start + count))
        got = forward(parity.model, parity.cache, parity.backend, step)
        wanted = expected[start : start + count]
        torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("block_size", [5, 16])
def test_a_window_does_not_hide_the_prompt(block_size: int) -> None:
    """As in Unlimited-OCR. Steps end in the prompt, after it, and one window after it."""
    parity, window, prompt = Parity("llama", block_size), 4, 33
    layout = parity.cache.layout
    parity.cache.layout = replace(layout, prompt_windows=(window,) * layout.num_layers)
    (sequence,) = parity.sequences(60)
    places = torch.arange(60)
    distance = places[:, None] - places
    seen = (distance >= 0) & ((distance < window) | (places < prompt))
    with torch.inference_mode():
        expected = parity.reference(
            input_ids=torch.tensor([sequence.token_ids]),
            attention_mask=torch.where(seen, 0.0, -torch.inf)[None, None],
            use_cache=False,
        ).logits[0]
    for count in (20, 15, 1, 23, 1):
        start = sequence.num_computed
        step = parity.maker.step([(sequence, count)], every_logit=True)
        step = replace(step, prompt_lens=np.array([prompt], np.int32))
        got = forward(parity.model, parity.cache, parity.backend, step)
        wanted = expected[start : start + count]
        torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_nan_in_one_sequence_leaves_others_alone() -> None:
    parity = Parity("llama", block_size=16)
    good, bad = parity.sequences(21, 30)
    parity.step([(good, 20), (bad, 29)])
    parity.cache.pool[bad.block_table] = float("nan")
    logits = parity.step([(bad, 1), (good, 1)])
    assert logits[0].isnan().all()
    torch.testing.assert_close(logits[1], parity.eager(good)[-1], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_fork_reads_the_shared_block_only_up_to_its_own_tokens() -> None:
    parity = Parity("llama", block_size=16)
    (leader,) = parity.sequences(40)
    parity.step([(leader, 26)])
    fork = HandSequence([*leader.token_ids[:20], 5, 6], leader.block_table[:2], 20)
    source, copied = fork.block_table[1], parity.maker.free.pop()
    fork.block_table = [fork.block_table[0], copied]
    parity.check([(leader, 3), (fork, 1)], copies=((source, copied),))
    parity.check([(fork, 1), (leader, 1)])


def test_a_follower_reads_what_the_same_step_writes() -> None:
    parity = Parity("qwen3", block_size=16)
    (leader,) = parity.sequences(34)
    leader.block_table = [parity.maker.free.pop() for _ in range(3)]
    follower = HandSequence([*leader.token_ids[:32], 9], leader.block_table[:2], 32)
    parity.check([(leader, 34), (follower, 1)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_stay_near_eager(dtype: torch.dtype) -> None:
    parity = Parity("llama", block_size=16, dtype=dtype)
    first, second = parity.sequences(40, 9)
    parity.step([(first, 39), (second, 8)])
    got = parity.step([(first, 1), (second, 1)]).float()
    expected = torch.stack([parity.eager(first)[-1], parity.eager(second)[-1]]).float()
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_fp8_cache_equals_rounded_keys_and_values(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both runs use torch, because a difference in the last bit can change the float8 value.
    monkeypatch.setattr(cpu_attention, "supports", lambda dtype: False)
    stored, rounded = (Parity(family, block_size=16, fp8=fp8) for fp8 in (True, False))
    write = rounded.cache.write

    def write_rounded(layer: int, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> None:
        write(
            layer, *(reference.stored(x, torch.float8_e4m3fn).float() for x in (key, value)), *rest
        )

    rounded.cache.write = write_rounded  # type: ignore[method-assign]
    runs = []
    for parity in (stored, rounded):
        first, second = parity.sequences(40, 9)
        parts = [(first, 39), (second, 8)], [(first, 1), (second, 1)]
        runs.append(torch.cat([parity.step(part) for part in parts]))
    torch.testing.assert_close(*runs, atol=TOLERANCE, rtol=TOLERANCE)
    exact = rounded.eager(first)[-1]
    assert not torch.allclose(runs[0][-2], exact, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.skipif(not cpu_attention.supports(torch.float32), reason="no C compiler here")
@pytest.mark.parametrize("block_size", [5, 16])
def test_c_kernels_read_an_fp8_cache(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results equal torch's, unless a key or value is rounded to an adjacent float8 value."""
    monkeypatch.undo()
    own = Parity("llama", block_size, fp8=True)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_attention, "reads", lambda *dtypes: False)
        by_torch = Parity("llama", block_size, fp8=True)
        expected = steps_of_two(by_torch)
    assert isinstance(own.backend, NativeAttention)
    assert not isinstance(by_torch.backend, NativeAttention)
    got = steps_of_two(own)
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


def steps_of_two(parity: Parity) -> torch.Tensor:
    first, second = parity.sequences(40, 9)
    parts = [(first, 39), (second, 8)], [(first, 1), (second, 1)]
    return torch.cat([parity.step(part).float() for part in parts])


def test_a_call_outside_paged_attention_is_refused() -> None:
    register()
    module = torch.nn.Module()
    module.layer_idx = 0
    query = torch.zeros(1, 4, 2, 8)
    with pytest.raises(UnsupportedAttentionError, match="mask"):
        paged_attention_forward(module, query, query, query, torch.zeros(1, 1, 2, 2))
    with pytest.raises(UnsupportedAttentionError, match="not causal"):
        paged_attention_forward(module, query, query, query, None, is_causal=False)
    with pytest.raises(UnsupportedAttentionError, match="position_bias"):
        paged_attention_forward(module, query, query, query, None, position_bias=query)
