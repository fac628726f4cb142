"""Fused mixtures of experts give the results of transformers' modules, in a few launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchinfer.worker.fusion import mixture as mixture_module
from batchinfer.worker.fusion.mixture import (
    FusedMixture,
    MixtureParts,
    chooses_alike,
    float32_copy,
    routings,
)
from tests.models import tiny_model
from tests.worker.on_triton import pretend_cuda, traced

pytestmark = [
    pytest.mark.usefixtures("on_triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
LAUNCHES = [
    *("linear", "_route_kernel", "_plan_experts_kernel"),
    *("_multiply_experts_kernel", "_multiply_experts_kernel", "_add_experts_kernel"),
]
MORE_GROUPS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": False},
    "mixtral": {},
    "gpt_oss": {"num_experts_per_tok": 2},
    "qwen3_next": {},
    "deepseek_v3": MORE_GROUPS,
    "deepseek_v2": MORE_GROUPS | {"topk_method": "group_limited_greedy", "n_shared_experts": 2},
    "lfm2_moe": {"num_dense_layers": 0},
}


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)


def mixture_of(family: str, **changes: Any) -> Any:
    """Return a family's mixture, with biases of the choice that are not 0."""
    model = tiny_model(family, **changes)
    mixture = next(module for module in model.modules() if MixtureParts.of(module))
    torch.manual_seed(1)
    for name, tensor in (*mixture.named_buffers(), *mixture.named_parameters()):
        if name.endswith("bias"):
            tensor.data.normal_()
    return mixture


def fused(mixture: Any) -> FusedMixture:
    """Return the fused mixture that chooses experts as a mixture does."""
    parts = MixtureParts.of(mixture)
    assert parts is not None
    returns_pair = isinstance(mixture(rows(1)), tuple)
    for routing in routings(mixture, parts):
        candidate = FusedMixture(
            mixture, routing, logits_dtype=torch.float32, returns_pair=returns_pair
        )
        if chooses_alike(mixture, candidate, rows(3), 1e-5):
            return candidate
    raise AssertionError("no routing is that of the mixture")


def rows(number: int) -> torch.Tensor:
    return torch.randn(1, number, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_launches(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = mixture_of(family, **FAMILIES[family])
    with torch.inference_mode():
        x, got = rows(7), fused(mixture)
        expected = mixture(x)
        with traced(monkeypatch) as trace:
            output = got(x)
        if isinstance(expected, tuple):
            expected, output = expected[0], output[0]
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        assert trace.names == LAUNCHES
        got.residual = residual = torch.ones(7, 32)
        got(x)
        torch.testing.assert_close(residual, 1 + expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_shared_experts_that_are_not_plain_are_added(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters, for example, are hooks of linear layers."""
    mixture = mixture_of(family)
    with torch.inference_mode():
        got, expected = fused(mixture), mixture(rows(5))
        got._shared.down_proj.lora = nn.Identity()
        torch.testing.assert_close(got(rows(5)), expected, rtol=1e-4, atol=1e-4)
        got.residual = residual = torch.ones(5, 32)
        with traced(monkeypatch) as trace:
            got(rows(5))
        torch.testing.assert_close(residual, 1 + expected[0], rtol=1e-4, atol=1e-4)
    assert "_silu_mul_kernel" in trace.names


def test_shared_experts_of_another_width_are_added() -> None:
    mixture = mixture_of("qwen3_next", shared_expert_intermediate_size=40)
    with torch.inference_mode():
        torch.testing.assert_close(fused(mixture)(rows(5)), mixture(rows(5)), rtol=1e-4, atol=1e-4)


def test_logits_have_the_dtype_of_the_family() -> None:
    """The routers of some families compute in float32, whatever the dtype of their weights."""
    mixture = mixture_of("deepseek_v3").bfloat16()
    parts = MixtureParts.of(mixture)
    assert parts is not None
    routing = next(routings(mixture, parts))
    wide = FusedMixture(mixture, routing, logits_dtype=torch.float32, returns_pair=False)
    assert wide.router.weight.dtype == torch.float32


def test_another_activation_is_not_that_of_the_kernel() -> None:
    mixture = mixture_of("qwen3_moe", hidden_act="gelu")
    with torch.inference_mode():
        assert not torch.allclose(fused(mixture)(rows(5)), mixture(rows(5)), rtol=1e-2)


def test_copies_in_float32_hold_one_expert_of_each_layer() -> None:
    mixture = mixture_of("qwen3_moe").bfloat16()
    copied = float32_copy(mixture)
    for weight in (copied.experts.gate_up_proj, copied.experts.down_proj):
        assert weight.dtype == torch.float32
        assert weight.untyped_storage().nbytes() == 4 * weight[0].numel()
    assert mixture.experts.down_proj.dtype == torch.bfloat16
    assert copied.gate.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "change",
    [
        lambda mixture: setattr(mixture, "another", nn.Linear(2, 2)),
        lambda mixture: setattr(mixture.experts, "has_gate", False),
        lambda mixture: delattr(mixture.gate, "top_k"),
        lambda mixture: setattr(mixture, "router", nn.Linear(2, 2)),
    ],
    ids=["part", "gate", "top_k", "routers"],
)
def test_mixtures_of_another_structure_are_not_fused(change: Any) -> None:
    mixture = mixture_of("qwen3_moe")
    change(mixture)
    assert MixtureParts.of(mixture) is None


def test_mixtures_on_a_cpu_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = mixture_of("qwen3_moe")
    monkeypatch.undo()
    assert MixtureParts.of(mixture) is None


def test_groups_that_the_kernel_does_not_support_have_no_routing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mixture_module, "supports_groups", lambda *_: False)
    mixture = mixture_of("deepseek_v3")
    parts = MixtureParts.of(mixture)
    assert parts is not None
    assert list(routings(mixture, parts)) == []
