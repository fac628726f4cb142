"""Chooses the experts of each token of a mixture, and lists the tokens of each expert.

Formula, for a token with router logits x [E]:

    p = softmax(x), or sigmoid(x)
    c = p + bias

The chosen experts are the k with the largest c; of equal ones, those with lower numbers. If experts
are in groups, only those in the best groups can be chosen; the score of a group is the sum of its
one or two largest c. An expert's weight is

    w = scale p / (sum of p over the chosen experts)      or      w = scale p

Softmax over the chosen experts alone (gpt-oss) is the first of these formulas. Shared experts,
which all tokens use, have the numbers from E on, and the weight 1, or the sigmoid of one more
logit.

Numbers are computed in float32. A logit that is NaN makes its weights NaN, but never an expert that
does not exist. `route` computes one token per program.

`plan_experts` sorts pairs of a token and one of its experts by expert, and cuts the pairs of each
expert into tiles of rows for `multiply_experts`. Each program counts all pairs, and then lists the
pairs of its own expert, in the order of tokens. No atomic operations are used, so the order is
always the same.

Sources: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2, for sigmoids, biases and groups.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS, check_launchable, warps_for

TILE_ROWS = 64
"""Rows of a tile. They are the same for any number of tokens, so that a row's bits do not depend on
other rows."""
_BLOCK = 1024  # pairs that a program of `plan_experts` reads at once
_TILES_BLOCK = 64  # tiles that it writes at once
_TINY: tl.constexpr = tl.constexpr(1e-20)  # keeps the sum of sigmoids above 0
_LEAST: tl.constexpr = tl.constexpr(-(2**63))
_LAST: tl.constexpr = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Routing:
    """How a mixture chooses experts."""

    num_experts: int
    """E, without shared experts."""
    num_chosen: int
    """k."""
    sigmoid: bool = False
    renormalizes: bool = True
    """True if weights are divided by the sum over the chosen experts."""
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_sum: int = 1
    """Number of experts, 1 or 2, whose scores are the score of a group."""
    num_shared: int = 0
    gates_shared: bool = False
    """True if logits have one more column, whose sigmoid is the weight of shared experts."""

    @property
    def per_token(self) -> int:
        """Number of experts of a token, with shared experts."""
        return self.num_chosen + self.num_shared

    @property
    def in_all(self) -> int:
        """Number of experts of the layer, with shared experts."""
        return self.num_experts + self.num_shared


@dataclass(frozen=True)
class ExpertWork:
    """The rows that each expert multiplies. A pair is `token * per_token + place`."""

    pairs: torch.Tensor  # [T * per_token] int32, sorted by expert and then by token
    tiles: torch.Tensor  # [3, N] int32: expert, first row, end of the rows; rows index `pairs`
    num_tiles: torch.Tensor  # [1] int32; later tiles are not used
    per_token: int


def route(
    logits: torch.Tensor,  # [T, E], or [T, E + 1] for gates; last dimension contiguous
    bias: torch.Tensor | None,  # [E] float32
    routing: Routing,
    *,
    experts: torch.Tensor,  # [T, per_token] int32, contiguous
    weights: torch.Tensor,  # [T, per_token] float32, contiguous
) -> None:
    """Write each token's experts, in descending order of their scores, and their weights.

    Raises:
        ValueError: the kernel does not support groups of this size.
    """
    check_launchable("route", logits, bias, experts, weights)
    if len(logits) == 0:
        return
    block = triton.next_power_of_2(routing.num_experts)
    if routing.num_groups > 1 and not supports_groups(routing.num_experts, routing.num_groups):
        raise ValueError(
            f"route: {routing.num_experts} experts in {routing.num_groups} groups; expected powers "
            "of two"
        )
    _route_kernel[(len(logits),)](
        logits,
        bias,
        experts,
        weights,
        logits.stride(0),
        routing.scale,
        EXPERTS=routing.num_experts,
        CHOSEN=routing.num_chosen,
        SHARED=routing.num_shared,
        GATES_SHARED=routing.gates_shared,
        SIGMOID=routing.sigmoid,
        RENORMALIZES=routing.renormalizes,
        GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups,
        GROUP_SUM=routing.group_sum,
        BLOCK=block,
        PLACES_BLOCK=triton.next_power_of_2(routing.per_token),
        num_warps=min(4, warps_for(block)),
        **OPTIONS,
    )


def supports_groups(num_experts: int, num_groups: int) -> bool:
    """Return True if `route` can choose among groups of this size."""
    return num_experts & (num_experts - 1) == 0 and num_groups & (num_groups - 1) == 0


def plan_experts(
    experts: torch.Tensor,  # [T, per_token] int32, contiguous
    num_experts: int,
) -> ExpertWork:
    """List the rows of each of `num_experts` experts, on the device."""
    check_launchable("plan_experts", experts)
    num_pairs = experts.numel()
    work = ExpertWork(
        pairs=experts.new_empty(num_pairs),
        tiles=experts.new_empty(3, most_tiles(num_pairs, num_experts)),
        num_tiles=experts.new_empty(1),
        per_token=experts.shape[1],
    )
    if num_pairs:
        _plan_experts_kernel[(num_experts,)](
            experts,
            work.pairs,
            work.tiles,
            work.num_tiles,
            num_pairs,
            work.tiles.shape[1],
            EXPERTS=num_experts,
            BINS=triton.next_power_of_2(num_experts + 1),
            ROWS=TILE_ROWS,
            BLOCK=_BLOCK,
            TILES_BLOCK=_TILES_BLOCK,
            num_warps=4,
            **OPTIONS,
        )
    return work


def most_tiles(num_pairs: int, num_experts: int) -> int:
    """Return an upper bound on the number of tiles: each expert has at most one tile that is not
    full."""
    return min(num_pairs, num_experts) + num_pairs // TILE_ROWS


@triton.jit
def _keys(values, ids):
    # Integers in the order of the values, and of equal values in descending order of ids. NaN comes
    # first, as the smallest.
    bits = values.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ _LAST, bits).to(tl.int64)
    order = tl.where(values == values, order, -_LAST - 1)
    return (order << 32) | (ids ^ _LAST).to(tl.int64)


@triton.jit(do_not_specialize=["scale"])
def _route_kernel(
    logits_ptr,  # [T, E] or [T, E + 1]
    bias_ptr,  # [E] float32, or None
    experts_ptr,  # [T, CHOSEN + SHARED] int32
    weights_ptr,  # [T, CHOSEN + SHARED] float32
    logits_stride,
    scale,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    GATES_SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    here = ids < EXPERTS
    logits_ptr += token * logits_stride
    logits = tl.load(logits_ptr + ids, mask=here, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(logits)
        total = 1.0
    else:
        scores = tl.exp(logits - tl.max(logits))
        total = tl.sum(scores)
    choice = logits
    if bias_ptr is not None:
        choice = scores / total + tl.load(bias_ptr + ids, mask=here, other=0.0)
    elif GROUPS > 1:
        choice = scores / total
    if GROUPS > 1:
        choice = _in_best_groups(choice, GROUPS, TOP_GROUPS, GROUP_SUM, BLOCK)

    places = tl.arange(0, PLACES_BLOCK)
    experts = EXPERTS - CHOSEN + places  # the numbers of shared experts, after the chosen ones
    weights = tl.zeros([PLACES_BLOCK], tl.float32)
    keys = tl.where(here, _keys(choice, ids), _LEAST)
    for place in range(CHOSEN):
        best = tl.max(keys, 0)
        score = tl.sum(tl.where(keys == best, scores, 0.0))
        expert = ((best & _LAST) ^ _LAST).to(tl.int32)
        experts = tl.where(places == place, expert, experts)
        weights = tl.where(places == place, score, weights)
        keys = tl.where(keys == best, _LEAST, keys)
    if RENORMALIZES:
        total = tl.sum(weights) + _TINY
    weights *= scale / total
    if SHARED > 0:
        shared_weight = 1.0
        if GATES_SHARED:
            shared_weight = tl.sigmoid(tl.load(logits_ptr + EXPERTS).to(tl.float32))
        weights = tl.where(places < CHOSEN, weights, shared_weight)
    in_range = places < CHOSEN + SHARED
    place = token * (CHOSEN + SHARED) + places
    tl.store(experts_ptr + place, experts, mask=in_range)
    tl.store(weights_ptr + place, weights, mask=in_range)


@triton.jit
def _in_best_groups(
    choice,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Replaces the scores of experts outside of the best groups by -inf.
    choice = tl.reshape(choice, [GROUPS, BLOCK // GROUPS])
    group_scores = tl.max(choice, 1)
    if GROUP_SUM == 2:
        keys = _keys(choice, tl.arange(0, BLOCK // GROUPS)[None, :])
        is_best = keys == tl.max(keys, 1)[:, None]
        group_scores += tl.max(tl.where(is_best, float("-inf"), choice), 1)
    keys = _keys(group_scores, tl.arange(0, GROUPS))
    for _ in range(TOP_GROUPS):
        keys = tl.where(keys == tl.max(keys, 0), _LEAST, keys)
    choice = tl.where((keys == _LEAST)[:, None], choice, float("-inf"))
    return tl.reshape(choice, [BLOCK])


@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def _plan_experts_kernel(
    experts_ptr,  # [S] int32
    pairs_ptr,  # [S] int32
    tiles_ptr,  # [3, most_tiles] int32
    num_tiles_ptr,  # [1] int32
    num_pairs,  # S
    most_tiles,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # a power of two above EXPERTS
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        chosen = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=EXPERTS)
        counts += tl.histogram(chosen, BINS)
    tiles = tl.where(bins < EXPERTS, (counts + ROWS - 1) // ROWS, 0)
    start = tl.sum(tl.where(bins < expert, counts, 0))
    end = start + tl.sum(tl.where(bins == expert, counts, 0))
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0))

    row = start
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        chosen = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=EXPERTS)
        is_own = (chosen == expert).to(tl.int32)
        tl.store(pairs_ptr + row + tl.cumsum(is_own, 0) - 1, pairs, mask=is_own > 0)
        row += tl.sum(is_own)

    own_tiles = (end - start + ROWS - 1) // ROWS
    for first in range(0, own_tiles, TILES_BLOCK):
        tile = first + tl.arange(0, TILES_BLOCK)
        in_range = tile < own_tiles
        ptrs = tiles_ptr + first_tile + tile
        tl.store(ptrs, tl.zeros([TILES_BLOCK], tl.int32) + expert, mask=in_range)
        tl.store(ptrs + most_tiles, start + tile * ROWS, mask=in_range)
        tl.store(ptrs + 2 * most_tiles, tl.minimum(start + (tile + 1) * ROWS, end), mask=in_range)
    if expert == EXPERTS - 1:
        tl.store(num_tiles_ptr, first_tile + own_tiles)
