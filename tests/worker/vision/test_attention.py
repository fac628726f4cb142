"""Attention of vision towers equals torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from batchinfer.kernels.cpu import paged_attention
from batchinfer.worker.linear_kernels import LinearKernel, linear_kernels
from batchinfer.worker.vision import attention


class NotCausal(torch.nn.Module):
    is_causal = False


def states(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    """Return queries, keys and values [B, H, T, D] as towers make them: a view of [B, T, H, D]."""
    torch.manual_seed(0)
    count, heads, length, width = shape
    return [torch.randn(count, length, heads, width).to(dtype).transpose(1, 2) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2, 1, 64), (1, 3, 33, 72), (2, 2, 64, 80), (3, 1, 130, 16)])
def test_attention_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not paged_attention.supports(dtype):
        pytest.skip("needs a C compiler")
    query, key, value = states(dtype, *shape)
    got, _ = attention.vision_attention_forward(NotCausal(), query, key, value, None, 0.3)
    expected, _ = sdpa_attention_forward(
        NotCausal(), *(x.float() for x in (query, key, value)), None, scaling=0.3
    )
    assert got.shape == expected.shape
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)


def test_attention_uses_the_instructions_of_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    if not paged_attention.supports(torch.float32):
        pytest.skip("needs a C compiler")
    asked: list[LinearKernel | None] = []
    choose = attention.instructions_for
    monkeypatch.setattr(
        attention,
        "instructions_for",
        lambda dtype, like: (asked.append(like), choose(dtype, like))[1],
    )
    query, key, value = states(torch.float32, 1, 2, 20, 16)
    kernels = linear_kernels(torch.float32)
    for like in kernels:
        function = AttentionInterface()[attention.vision_attention(like)]
        function(NotCausal(), query, key, value, None)
    assert asked == list(kernels)


@pytest.mark.parametrize("case", ["mask", "causal"])
def test_masks_and_causal_calls_go_to_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the kernel ignores masks")

    monkeypatch.setattr(attention, "paged_attention", refuse)
    query, key, value = states(torch.float32, 1, 2, 20, 16)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril() if case == "mask" else None
    arguments: dict[str, Any] = {"is_causal": case == "causal"}
    got, _ = attention.vision_attention_forward(
        torch.nn.Module(), query, key, value, mask, **arguments
    )
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(got.transpose(1, 2), expected)
