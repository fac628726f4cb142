"""References of `route.py` and `experts.py` in plain torch, which define the correct results."""

import torch

from batchinfer.kernels.experts import ExpertMatrix, GatedActivation
from batchinfer.kernels.route import TILE_ROWS, ExpertWork, Routing


def route(
    logits: torch.Tensor,  # [T, E], or [T, E + 1] for gates
    bias: torch.Tensor | None,  # [E] float32
    routing: Routing,
    *,
    experts: torch.Tensor,  # [T, per_token] int32
    weights: torch.Tensor,  # [T, per_token] float32
) -> None:
    """Write each token's experts, in descending order of their scores, and their weights."""
    chosen = logits[:, : routing.num_experts].float()
    scores = chosen.sigmoid() if routing.sigmoid else chosen.softmax(1)
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        grouped = choice.view(len(choice), routing.num_groups, -1)
        best = grouped.topk(routing.group_sum, dim=2).values.sum(2).topk(routing.top_groups).indices
        is_best = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=logits.device)
        is_best.scatter_(1, best, value=True)
        choice = grouped.masked_fill(~is_best[..., None], -torch.inf).flatten(1)
    indices = choice.sort(dim=1, descending=True, stable=True).indices[:, : routing.num_chosen]
    picked = scores.gather(1, indices)
    if routing.renormalizes:
        picked = picked / (picked.sum(1, keepdim=True) + 1e-20)
    experts[:, : routing.num_chosen] = indices
    weights[:, : routing.num_chosen] = picked * routing.scale
    experts[:, routing.num_chosen :] = torch.arange(routing.num_experts, routing.in_all)
    weights[:, routing.num_chosen :] = (
        logits[:, -1:].float().sigmoid() if routing.gates_shared else 1
    )


def plan_experts(
    experts: torch.Tensor,  # [T, per_token] int32
    num_experts: int,
) -> ExpertWork:
    """List the rows of each of `num_experts` experts."""
    pairs = experts.flatten().sort(stable=True).indices
    tiles, start = [], 0
    for expert in range(num_experts):
        end = start + int((experts == expert).sum())
        firsts = range(start, end, TILE_ROWS)
        tiles += [(expert, first, min(first + TILE_ROWS, end)) for first in firsts]
        start = end
    return ExpertWork(
        pairs=pairs.int(),
        tiles=torch.tensor(tiles, dtype=torch.int32).view(-1, 3).T.contiguous(),
        num_tiles=torch.tensor([len(tiles)], dtype=torch.int32),
        per_token=experts.shape[1],
    )


def multiply_experts(
    x: torch.Tensor,  # [T, K] with an activation, else [S, K] in the order of `work.pairs`
    work: ExpertWork,
    matrix: ExpertMatrix,
    *,
    out: torch.Tensor,  # [S, N / 2] in this order with an activation, else [S, N] by pair
    activation: GatedActivation | None = None,
) -> None:
    """Multiply each pair's row by the matrix of its expert."""
    pairs = work.pairs.long()
    for expert, start, end in work.tiles[:, : int(work.num_tiles)].T.tolist():
        rows = slice(start, end)
        weight, bias = _of_expert(matrix, expert, gated=activation is not None)
        places = rows if activation is None else pairs[rows] // work.per_token
        products = x[places].double() @ weight.double().T + bias
        if activation is None:
            out[pairs[rows]] = products.to(out.dtype)
        else:
            out[rows] = _activated(products, activation).to(out.dtype)


def _of_expert(
    matrix: ExpertMatrix, expert: int, *, gated: bool
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the weight [N, K] and the bias of an expert."""
    if expert < len(matrix.weight):
        return matrix.weight[expert], 0.0 if matrix.bias is None else matrix.bias[expert].double()
    assert matrix.shared is not None
    _, outputs, depth = matrix.weight.shape
    at = expert - len(matrix.weight)
    if not gated:
        return matrix.shared[:, at * depth : (at + 1) * depth], 0.0
    parts = matrix.shared.view(2, matrix.num_shared, outputs // 2, depth)
    return parts[:, at].reshape(outputs, depth), 0.0


def _activated(products: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    gate, up = products.chunk(2, dim=1)
    if activation.interleaved:
        gate, up = products[:, ::2], products[:, 1::2]
    if activation.limit is None:
        return gate * gate.sigmoid() * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (up + 1) * gate * (activation.alpha * gate).sigmoid()


def add_experts(
    products: torch.Tensor,  # [T * per_token, W]
    weights: torch.Tensor,  # [T, per_token] float32
    *,
    out: torch.Tensor,  # [T, W]
    adds: bool = False,
) -> None:
    """Write the weighted sum of each token's products to `out`, or add it to `out`."""
    by_token = products.view(*weights.shape, out.shape[1]).double()
    total = (by_token * weights.double()[..., None]).sum(1)
    out.copy_(total + out.double() if adds else total)
