"""Inputs for comparing the kernels of mixtures of experts with their references."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from batchinfer.kernels.experts import ExpertMatrix, GatedActivation
from batchinfer.kernels.route import Routing
from tests.kernels.cases import Case

SILU = GatedActivation()
GPT_OSS = GatedActivation(interleaved=True, alpha=1.702, limit=7.0)


@dataclass(frozen=True)
class RouteCase(Case):
    num_tokens: int
    routing: Routing
    bias: bool = False


_V3 = Routing(16, 5, sigmoid=True, scale=2.5, num_groups=4, top_groups=2, group_sum=2, num_shared=1)
ROUTE_CASES = (
    RouteCase("qwen3", 5, Routing(128, 8)),
    RouteCase("not_normalized", 3, Routing(60, 4, renormalizes=False, scale=0.7)),
    RouteCase("one", 1, Routing(1, 1)),
    RouteCase("all", 2, Routing(7, 7)),
    RouteCase("gated_shared", 4, Routing(12, 3, num_shared=2, gates_shared=True)),
    RouteCase("biased", 6, Routing(24, 3, sigmoid=True), bias=True),
    RouteCase("biased_softmax", 6, Routing(24, 3), bias=True),
    RouteCase("v3", 9, _V3, bias=True),
    RouteCase(
        "v2", 7, Routing(16, 3, renormalizes=False, num_groups=8, top_groups=3, num_shared=2)
    ),
    RouteCase("no_tokens", 0, Routing(8, 2)),
)


def build_route(
    case: RouteCase, device: torch.device | str, dtype: torch.dtype
) -> dict[str, torch.Tensor | Routing | None]:
    """Return the arguments of `route`; outputs hold numbers that are no results."""
    generator = torch.Generator().manual_seed(0)
    routing = case.routing
    columns = routing.num_experts + routing.gates_shared
    logits = 2 * torch.randn(case.num_tokens, columns + 3, generator=generator)
    bias = torch.randn(routing.num_experts, generator=generator) if case.bias else None
    shape = case.num_tokens, routing.per_token
    return {
        "logits": logits.to(device, dtype)[:, :columns],
        "bias": None if bias is None else bias.to(device),
        "routing": routing,
        "experts": torch.full(shape, -1, dtype=torch.int32, device=device),
        "weights": torch.full(shape, torch.nan, device=device),
    }


@dataclass(frozen=True)
class ExpertsCase(Case):
    """`num_tokens` tokens with `per_token` of `num_experts` experts, shared experts included."""

    num_tokens: int
    num_experts: int
    per_token: int
    hidden: int
    width: int
    """Outputs of a gate."""
    num_shared: int = 0
    transposed: bool = False
    bias: bool = False
    activation: GatedActivation = SILU
    skewed: bool = False
    """True if all tokens choose the same experts."""


EXPERTS_CASES = (
    ExpertsCase("one", 1, 1, 1, 16, 8),
    ExpertsCase("odd", 7, 5, 3, 45, 23),
    ExpertsCase("many_tiles", 150, 3, 2, 33, 70, skewed=True),
    ExpertsCase("shared", 9, 4, 3, 40, 24, num_shared=1),
    ExpertsCase("two_shared", 70, 5, 4, 24, 68, num_shared=2),
    ExpertsCase("gpt_oss", 20, 4, 2, 48, 40, transposed=True, bias=True, activation=GPT_OSS),
    ExpertsCase("transposed_odd", 20, 4, 2, 21, 13, transposed=True, bias=True),
    ExpertsCase("limited", 6, 4, 2, 20, 20, activation=replace(GPT_OSS, interleaved=False)),
    ExpertsCase("no_tokens", 0, 4, 2, 16, 16),
)


@dataclass(frozen=True)
class ExpertsInput:
    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    gate_up: ExpertMatrix
    down: ExpertMatrix
    activation: GatedActivation

    def rows(self, rows: list[int]) -> ExpertsInput:
        """Return the same layer with some of the tokens."""
        return replace(self, x=self.x[rows], experts=self.experts[rows], weights=self.weights[rows])


def build_experts(
    case: ExpertsCase, device: torch.device | str, dtype: torch.dtype
) -> ExpertsInput:
    """Return rows and weights; there is NaN between the rows."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    routed = case.num_experts - case.num_shared

    def matrix(outputs: int, depth: int, shared: tuple[int, int]) -> ExpertMatrix:
        weight = normal(routed, depth, outputs).mT if case.transposed else None
        return ExpertMatrix(
            normal(routed, outputs, depth) if weight is None else weight,
            normal(routed, outputs) if case.bias else None,
            normal(*shared) if case.num_shared else None,
            case.num_shared,
        )

    scores = torch.rand(1 if case.skewed else case.num_tokens, routed, generator=generator)
    chosen = scores.topk(case.per_token - case.num_shared).indices.expand(case.num_tokens, -1)
    shared = torch.arange(routed, case.num_experts).expand(case.num_tokens, -1)
    x = torch.full((case.num_tokens, case.hidden + 3), torch.nan).to(device, dtype)
    x[:, : case.hidden] = normal(case.num_tokens, case.hidden)
    joined = case.num_shared * case.width
    return ExpertsInput(
        x=x[:, : case.hidden],
        experts=torch.cat([chosen, shared], dim=1).int().contiguous().to(device),
        weights=torch.rand(case.num_tokens, case.per_token, generator=generator).to(device),
        gate_up=matrix(2 * case.width, case.hidden, (2 * joined, case.hidden)),
        down=matrix(case.hidden, case.width, (case.hidden, joined)),
        activation=case.activation,
    )
