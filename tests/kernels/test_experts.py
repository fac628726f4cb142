"""The kernels of mixtures of experts match their references, and a row's bits do not depend on
other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchinfer.kernels import experts, experts_reference, route
from batchinfer.kernels.route import Routing
from tests.kernels.expert_cases import (
    EXPERTS_CASES,
    ROUTE_CASES,
    ExpertsCase,
    ExpertsInput,
    RouteCase,
    build_experts,
    build_route,
)
from tests.kernels.gpu_or_interpreter import on_both, on_both_devices
from tests.kernels.interpreted_dot import sum_rows_alike

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@on_both()
@pytest.mark.parametrize("case", ROUTE_CASES, ids=str)
def test_route_equals_reference(case: RouteCase, dtype: torch.dtype, device: str) -> None:
    got, expected = (build_route(case, device, dtype) for _ in range(2))
    route.route(**got)  # type: ignore[arg-type]
    experts_reference.route(**expected)  # type: ignore[arg-type]
    assert torch.equal(got["experts"], expected["experts"])  # type: ignore[arg-type]
    torch.testing.assert_close(got["weights"], expected["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", ROUTE_CASES[:-1], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_tokens_with_nan_choose_experts_that_exist(
    case: RouteCase, bad: float, interpreter: str
) -> None:
    arguments: dict[str, Any] = build_route(case, interpreter, torch.float32)
    arguments["logits"][0] = bad
    route.route(**arguments)
    chosen = arguments["experts"][0].tolist()
    assert len(set(chosen)) == len(chosen) == case.routing.per_token
    assert set(chosen) <= set(range(case.routing.in_all))
    if bad != bad:
        assert arguments["weights"][0, : case.routing.num_chosen].isnan().all()
    assert arguments["weights"][1:].isfinite().all()


def test_of_equal_logits_lower_experts_are_chosen(interpreter: str) -> None:
    arguments: dict[str, Any] = build_route(
        RouteCase("", 2, Routing(9, 4)), interpreter, torch.float32
    )
    arguments["logits"][:] = torch.tensor([0.0, 1, 1, 0, -0.0, 1, 0, 0, 0])
    route.route(**arguments)
    assert arguments["experts"].tolist() == [[1, 2, 5, 0]] * 2


def test_groups_that_are_no_powers_of_two_are_refused(interpreter: str) -> None:
    case = RouteCase("", 2, Routing(12, 4, num_groups=4, top_groups=2))
    arguments: dict[str, Any] = build_route(case, interpreter, torch.float32)
    with pytest.raises(ValueError, match="12 experts in 4 groups; expected powers of two"):
        route.route(**arguments)


@on_both_devices
@pytest.mark.parametrize("case", EXPERTS_CASES, ids=str)
def test_plan_equals_reference(case: ExpertsCase, device: str) -> None:
    chosen = build_experts(case, device, torch.float32).experts
    got = route.plan_experts(chosen, case.num_experts)
    expected = experts_reference.plan_experts(chosen, case.num_experts)
    assert torch.equal(got.pairs, expected.pairs)
    if case.num_tokens:
        assert got.num_tiles.tolist() == expected.num_tiles.tolist()
    num_tiles = expected.num_tiles.item()
    assert torch.equal(got.tiles[:, :num_tiles], expected.tiles)


def test_plan_of_more_pairs_than_a_program_reads_at_once(interpreter: str) -> None:
    chosen = torch.randint(3, (1500, 2), generator=torch.Generator().manual_seed(0)).int()
    chosen[:, 1] = 70  # an expert with more tiles than are written at once would need 4,096 rows
    got = route.plan_experts(chosen, 80)
    expected = experts_reference.plan_experts(chosen, 80)
    assert torch.equal(got.pairs, expected.pairs)
    assert torch.equal(got.tiles[:, : expected.num_tiles], expected.tiles)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 4096, 9000])
def test_tiles_of_any_choice_fit(rows: int) -> None:
    for num_experts in (1, 8, 257):
        worst = [rows // num_experts + 1] * num_experts
        tiles = sum(-(-count // route.TILE_ROWS) for count in worst)
        assert tiles <= route.most_tiles(sum(worst), num_experts)
        assert min(rows, num_experts) <= route.most_tiles(rows, num_experts)


def run(inputs: ExpertsInput, kernels: Any, plan: Any, *, adds: bool = False) -> torch.Tensor:
    """Return the output of all tokens. There is NaN after the rows of the kernels' results."""
    work = plan(inputs.experts, len(inputs.gate_up.weight) + inputs.gate_up.num_shared)
    num_pairs, width = inputs.experts.numel(), inputs.down.weight.shape[2]
    activated = inputs.x.new_full((num_pairs + 1, width), torch.nan)
    kernels.multiply_experts(
        inputs.x, work, inputs.gate_up, out=activated[:-1], activation=inputs.activation
    )
    products = inputs.x.new_full((num_pairs + 1, inputs.x.shape[1]), torch.nan)
    kernels.multiply_experts(activated[:-1], work, inputs.down, out=products[:-1])
    out = torch.ones_like(inputs.x) if adds else torch.full_like(inputs.x, torch.nan)
    kernels.add_experts(products[:-1], inputs.weights, out=out, adds=adds)
    assert activated[-1].isnan().all()
    assert products[-1].isnan().all()
    return out


@on_both()
@pytest.mark.parametrize("adds", [False, True], ids=["writes", "adds"])
@pytest.mark.parametrize("case", EXPERTS_CASES, ids=str)
def test_experts_equal_reference(
    case: ExpertsCase, adds: bool, dtype: torch.dtype, device: str
) -> None:
    inputs = build_experts(case, device, dtype)
    got = run(inputs, experts, route.plan_experts, adds=adds)
    expected = run(inputs, experts_reference, experts_reference.plan_experts, adds=adds)
    size = expected.double().norm() / max(1, expected.numel()) ** 0.5
    torch.testing.assert_close(
        got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * float(size)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_token_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sum_rows_alike(monkeypatch)
    case = EXPERTS_CASES[4]
    inputs = build_experts(case, interpreter, dtype)
    together = run(inputs, experts, route.plan_experts)
    for rows in ([3], [69, 3], [*range(40, 3, -1)]):
        some = inputs.rows(rows)
        assert torch.equal(run(some, experts, route.plan_experts), together[rows])


def test_shapes_that_do_not_match_are_refused(interpreter: str) -> None:
    inputs = build_experts(EXPERTS_CASES[1], interpreter, torch.float32)
    work = route.plan_experts(inputs.experts, 5)
    out = inputs.x.new_empty(21, 23)
    for x in (inputs.x[:, :-1], inputs.x.half(), inputs.x[1:]):
        with pytest.raises(ValueError, match="expected contiguous rows"):
            experts.multiply_experts(x, work, inputs.gate_up, out=out, activation=inputs.activation)
    with pytest.raises(ValueError, match=r"out is \[21, 23\]; expected contiguous \[21, 46\]"):
        experts.multiply_experts(inputs.x[:1].expand(21, -1), work, inputs.gate_up, out=out)
