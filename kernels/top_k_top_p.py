"""Finds the tokens that top-k and top-p keep, exactly and without sorting the row.

Tokens have a total order: larger logits first, equal logits by ascending id (-0 equals 0). Top-k
and top-p keep a prefix of this order, which is identified by the key and id of the prefix's last
token. Top-k keeps k tokens. Top-p (Holtzman et al. 2020, arXiv:1904.09751) keeps the shortest
prefix with

    float64(mass of the prefix) >= float64(top_p) float64(mass after top-k)

Masses are sums of integer weights, so that ties and sums are the same as on a CPU.

A pass over the row sums the weights above an interval of keys, and stores the tokens inside the
interval (the candidates). If the prefix ends in the interval and all candidates fit into memory,
bisection finds the prefix's end among the candidates. Every lane of the program keeps the maximum
of the logits that it has read. The first interval contains the k largest of these maxima (1,024 for
top-p alone), and therefore at least k tokens. One pass is enough unless the row is flat.

For flat rows, `search_last_kept` continues. From a sample of one tile per segment, it estimates
where the prefix ends. Another pass stores the tokens of a smaller interval around this estimate. If
estimates fail too often, the interval is halved instead, down to a single key whose tokens are
counted in the order of their ids. Most flat rows need one more pass, and none needs more than 32.

Related work: the pivots of RTop-K and Qrita (Park et al. 2026, arXiv:2602.01518; vLLM,
vllm/v1/sample/ops/topk_topp_triton.py), and FlashInfer's rejection sampling
(include/flashinfer/sampling.cuh), which draws different tokens than inverse transform sampling.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from batchinfer.kernels.sampling_weights import (
    LOWEST_KEY,
    is_kept,
    last_reaching,
    load_logits,
    sort_keys,
    weigh,
)

_FIRST_TOKENS: tl.constexpr = tl.constexpr(1024)
# Margin on both sides of an estimate, as a share of the kept mass: about the estimate's standard
# deviation. With a larger margin, the interval would have more candidates than can be stored.
_MARGIN: tl.constexpr = tl.constexpr(1 / 200)
_PASSES_BY_SAMPLE: tl.constexpr = tl.constexpr(5)
# Number of loads in flight. There must be several, because a multiprocessor has space for only one
# program at a time.
_STAGES: tl.constexpr = tl.constexpr(3)


class Candidates(NamedTuple):
    """The output of a pass over a row: sums of tiles, and each segment's tokens inside an
    interval."""

    tile_sums: torch.Tensor  # [NUM_TILES] int64: sum of each tile's weights above the interval
    logits: torch.Tensor  # [SEGMENTS, CANDIDATES] float32
    ids: torch.Tensor  # [SEGMENTS, CANDIDATES] int32


@triton.jit
def add_up(
    row,  # argument of `load_logits`
    scale,  # argument of `weigh`
    cut,  # key of the last token kept so far
    last,  # id of the last token kept so far
    low,  # first key of the interval
    high,  # last key of the interval
    candidates,  # Candidates
    shape,  # RowShape; without filters, all tokens are above the interval
    STAGES: tl.constexpr = 1,  # number of loads in flight
):
    """Make one pass over the row. Return the number of tokens above the interval; each segment's
    number of tokens inside the interval; and three sums of weights: above the interval, inside the
    interval, and of all kept tokens."""
    segments = tl.arange(0, shape.SEGMENTS)
    tokens_above = tl.zeros([shape.SEGMENTS], tl.int32)
    num_candidates = tl.zeros([shape.SEGMENTS], tl.int32)
    above = tl.zeros([shape.SEGMENTS], tl.int64)
    inside = tl.zeros([shape.SEGMENTS], tl.int64)
    every = tl.zeros([shape.SEGMENTS], tl.int64)
    for start in tl.range(0, shape.VOCAB, shape.SEGMENTS * shape.WIDTH, num_stages=STAGES):
        columns = start + segments[:, None] * shape.WIDTH + tl.arange(0, shape.WIDTH)[None]
        _, x = load_logits(row, columns, shape)
        if shape.CANDIDATES == 0:
            sums = tl.sum(weigh(x, scale), 1)
        else:
            keys = sort_keys(x, shape.SHIFT)
            kept = (columns < shape.VOCAB) & is_kept(keys, columns, cut, last)
            is_above = kept & (keys > high)
            is_inside = kept & (keys >= low) & (keys <= high)
            count = is_inside.to(tl.int32)
            place = num_candidates[:, None] + tl.cumsum(count, 1) - 1
            at = segments[:, None] * shape.CANDIDATES + place
            tl.store(candidates.logits + at, x, mask=is_inside & (place < shape.CANDIDATES))
            tl.store(candidates.ids + at, columns, mask=is_inside & (place < shape.CANDIDATES))
            num_candidates += tl.sum(count, 1)
            tokens_above += tl.sum(is_above.to(tl.int32), 1)
            weights = weigh(x, scale)
            nothing = tl.zeros_like(weights)
            sums = tl.sum(tl.where(is_above, weights, nothing), 1)
            inside += tl.sum(tl.where(is_inside, weights, nothing), 1)
            every += tl.sum(tl.where(kept, weights, nothing), 1)
        above += sums
        tiles = start // shape.WIDTH + segments
        tl.store(candidates.tile_sums + tiles, sums, mask=tiles * shape.WIDTH < shape.VOCAB)
    tl.debug_barrier()  # threads now read values that other threads have written
    return tl.sum(tokens_above), num_candidates, tl.sum(above), tl.sum(inside), tl.sum(every)


@triton.jit
def goal_of_share(share, every):
    """Return the smallest mass, at least 1, that reaches `share` of the mass `every`. Masses are
    compared in float64."""
    target = share.to(tl.float64) * every.to(tl.float64)
    goal = target.to(tl.int64) + 512
    # Below 2^62, up to 512 adjacent integers round to the same float64 number.
    for doubling in tl.static_range(10):
        less = goal - (512 >> doubling)
        goal = tl.where(less.to(tl.float64) >= target, less, goal)
    return tl.maximum(goal, 1)


@triton.jit
def first_low(keys, top_key, k):
    """Return the first key of the first interval, so that this interval has at least `k` tokens (or
    all).

    Args:
        keys: keys of the lanes' maxima.
        k: number of tokens that top-k keeps; 0 without top-k.
    """
    most = tl.where(k > 0, k, _FIRST_TOKENS).to(tl.int64)
    ones = tl.full(keys.shape, 1, tl.int64)
    least = tl.full([], LOWEST_KEY + 1, tl.int32)
    return last_reaching(keys, ones, most, least, top_key)


@triton.jit
def end_inside(keys, ids, measures, goal, low, high, VOCAB: tl.constexpr):
    """Find the fewest tokens, by descending key and then ascending id, whose `measures` (weights,
    or 1 for each token) add up to at least `goal`. Return the key and id of the last of them. Its
    key must be in [low, high]."""
    cut = last_reaching(keys, measures, goal, low, high)
    nothing = tl.zeros_like(measures)
    goal -= tl.sum(tl.where(keys > cut, measures, nothing))
    equals = tl.where(keys == cut, measures, nothing)
    none, all_ids = tl.full([], -VOCAB, tl.int32), tl.full([], 0, tl.int32)
    return cut, -last_reaching(-ids, equals, goal, none, all_ids)


@triton.jit
def load_candidates(scale, cut, last, num_candidates, candidates, shape):
    """Return the candidates' keys, ids and weights, [SEGMENTS, CANDIDATES], and a mask that is true
    for valid entries."""
    places = tl.arange(0, shape.CANDIDATES)[None]
    valid = places < num_candidates[:, None]
    at = tl.arange(0, shape.SEGMENTS)[:, None] * shape.CANDIDATES + places
    x = tl.load(candidates.logits + at, mask=valid, other=float("-inf"))
    ids = tl.load(candidates.ids + at, mask=valid, other=0)
    keys = sort_keys(x, shape.SHIFT)
    weights = weigh(x, scale)
    valid = valid & is_kept(keys, ids, cut, last)
    return keys, ids, tl.where(valid, weights, tl.zeros_like(weights)), valid


@triton.jit
def keep_candidates(keys, ids, weights, cut, last, tile_sums_ptr, WIDTH: tl.constexpr):
    """Add the weights of the kept candidates to the sums of their tiles."""
    kept = is_kept(keys, ids, cut, last)  # invalid entries have weight 0
    tl.atomic_add(tile_sums_ptr + ids // WIDTH, weights, mask=kept)
    tl.debug_barrier()


@triton.jit
def find_in_one_pass(
    row,
    scale,
    k,  # tokens that top-k keeps; 0 = all
    top_p,
    low,  # first key of the interval, from `first_low`
    top_key,  # last key of the interval, and of the row
    candidates,  # Candidates; on return, `tile_sums` holds each tile's sum of kept weights
    shape,  # RowShape
):
    """Return the key and the id of the last token that remains after top-k and then top-p; true if
    this token was found; the total weight of the tokens inside the interval; and the total weight
    of all tokens."""
    lowest, every_id = tl.full([], LOWEST_KEY, tl.int32), tl.full([], shape.VOCAB, tl.int32)
    cut, last = lowest, every_id
    filtered = (k > 0) | (top_p < 1.0)
    # Without filters, the interval is below all keys, so that no token is a candidate.
    low, high = tl.where(filtered, low, lowest), tl.where(filtered, top_key, lowest)
    _, num_candidates, _, inside, every = add_up(
        row, scale, cut, last, low, high, candidates, shape, _STAGES
    )
    done = ~filtered
    if filtered & (tl.max(num_candidates) <= shape.CANDIDATES):
        keys, ids, weights, valid = load_candidates(
            scale, cut, last, num_candidates, candidates, shape
        )
        mass = every
        if k > 0:
            cut, last = end_inside(
                keys, ids, valid.to(tl.int64), k.to(tl.int64), low, high, shape.VOCAB
            )
            weights = tl.where(is_kept(keys, ids, cut, last), weights, tl.zeros_like(weights))
            mass = tl.sum(weights)
        goal = goal_of_share(top_p, mass)
        done = (k > 0) | (inside >= goal)
        if done:
            cut, last = end_inside(keys, ids, weights, goal, low, high, shape.VOCAB)
            keep_candidates(keys, ids, weights, cut, last, candidates.tile_sums, shape.WIDTH)
    return cut, last, done, inside, every


@triton.jit
def _logit_of(key, SHIFT: tl.constexpr):
    """Return the float32 number that has this key: the inverse of `sort_keys`."""
    key = (key << SHIFT) | tl.where(key < 0, 2**SHIFT - 1, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _times(each, goal):
    """Return the smallest n, at most 2^22, for which n * each reaches the goal.

    (A 64-bit division would be a function call, for which the compiler would reserve a stack.)
    """
    less = tl.full([], 0, tl.int64)
    for doubling in tl.static_range(22):
        more = less + (2097152 >> doubling)
        less = tl.where(more * each < goal, more, less)
    return less + 1


@triton.jit
def _nth_of_key(row, key, n, shape):
    """Make a pass over the row, and return the id of its n-th token with this key (n from 1)."""
    at = tl.full([], shape.VOCAB, tl.int32)
    lanes = tl.arange(0, shape.SEGMENTS)[:, None] * shape.WIDTH + tl.arange(0, shape.WIDTH)[None]
    for start in range(0, shape.VOCAB, shape.SEGMENTS * shape.WIDTH):
        columns = start + lanes
        _, x = load_logits(row, columns, shape)
        equal = ((columns < shape.VOCAB) & (sort_keys(x, shape.SHIFT) == key)).to(tl.int32)
        count = tl.sum(equal, 1)
        before = tl.cumsum(count, 0) - count
        is_it = (equal > 0) & (tl.cumsum(equal, 1) == n - before[:, None])
        at = tl.minimum(at, tl.min(tl.where(is_it, columns, shape.VOCAB)))
        n -= tl.sum(count)
    return at


@triton.jit
def _interval_by_sample(
    row, scale, cut, last, by_mass, known, known_above, goal, measured, low, high, shape
):
    """Return an interval within [low, high] around the estimated end of the prefix.

    The estimate is based on one tile of the row per segment. A measure is a sum of weights if
    `by_mass`, else a number of tokens. `known_above` is the exact measure of the tokens with keys
    above `known`, and `measured` is the measure of all kept tokens.
    """
    num_tiles: tl.constexpr = (shape.VOCAB + shape.WIDTH - 1) // shape.WIDTH
    tiles = (tl.arange(0, shape.SEGMENTS) * num_tiles) // shape.SEGMENTS
    columns = tiles[:, None] * shape.WIDTH + tl.arange(0, shape.WIDTH)[None]
    _, x = load_logits(row, columns, shape)
    keys = sort_keys(x, shape.SHIFT)
    kept = (columns < shape.VOCAB) & is_kept(keys, columns, cut, last)
    measures = tl.where(kept, tl.where(by_mass, weigh(x, scale), 1), 0)
    every = tl.sum(measures).to(tl.float32)
    share = (goal - known_above).to(tl.float32) / measured.to(tl.float32)
    place = tl.sum(tl.where(keys > known, measures, 0)).to(tl.float32) + share * every
    more, less = (place + _MARGIN * every).to(tl.int64), (place - _MARGIN * every).to(tl.int64)
    new_low = last_reaching(keys, measures, more, low, high)
    return new_low, last_reaching(keys, measures, tl.maximum(less, 1), new_low, high)


@triton.jit
def _mass_kept(row, scale, cut, last, candidates, shape):
    """Return the sum of kept weights, and write each tile's sum of kept weights."""
    lowest = tl.full([], LOWEST_KEY, tl.int32)
    _, _, every, _, _ = add_up(row, scale, cut, last, lowest, lowest, candidates, shape)
    return every


@triton.jit
def search_last_kept(
    row,
    scale,
    k,  # tokens that top-k keeps; 0 = all
    top_p,
    first_low,  # first key of the interval of `find_in_one_pass`
    top_key,  # last key of that interval, and of the row
    masses_ptr,  # [2] int64: sums of weights in that interval and of all tokens
    candidates,  # Candidates; on return, `tile_sums` holds each tile's sum of kept weights
    shape,  # RowShape
):
    """Return the key and id of the last token that top-k and then top-p keep."""
    lowest = tl.full([], LOWEST_KEY, tl.int32)
    cut, last = lowest, tl.full([], shape.VOCAB, tl.int32)
    summed = k < 0
    for by_mass in range(0, 2):
        searching = (by_mass == 1) | (k > 0)
        # The first interval had too many candidates or, with top-p alone, did not contain the
        # prefix's end.
        floor, ceiling, passes = first_low, top_key, tl.full([], 0, tl.int32)
        goal, measured = k.to(tl.int64), tl.full([], shape.VOCAB, tl.int64)
        known, known_above = top_key, tl.full([], 0, tl.int64)
        if by_mass == 1:
            inside, every = tl.load(masses_ptr), tl.load(masses_ptr + 1)
            if k > 0:
                floor, every = cut, _mass_kept(row, scale, cut, last, candidates, shape)
            goal, measured = goal_of_share(top_p, every), every
            if (k == 0) & (inside < goal):
                floor, ceiling = lowest, first_low - 1
                known, known_above = ceiling, inside
        while searching:
            # Add 0 to the addresses, in a way that the compiler cannot see through. The compiler
            # would otherwise keep the constant addresses in registers through all passes, and there
            # are too few registers.
            nothing = tl.minimum(passes, 0)
            here = Candidates(
                candidates.tile_sums, candidates.logits + nothing, candidates.ids + nothing
            )
            low = (floor.to(tl.int64) + (ceiling.to(tl.int64) - floor + 1) // 2).to(tl.int32)
            high = ceiling
            if passes < _PASSES_BY_SAMPLE:
                low, high = _interval_by_sample(
                    row, scale, cut, last, by_mass == 1, known, known_above, goal, measured,
                    floor, ceiling, shape,
                )  # fmt: skip
            tokens, num_candidates, mass, mass_inside, _ = add_up(
                row, scale, cut, last, low, high, here, shape
            )
            passes += 1
            above, through = tokens.to(tl.int64), (tokens + tl.sum(num_candidates)).to(tl.int64)
            if by_mass == 1:
                above, through = mass, mass + mass_inside
            known, known_above = high, above
            if above >= goal:
                floor = high + 1
            elif through < goal:
                ceiling, known, known_above = low - 1, low - 1, through
            elif tl.max(num_candidates) <= shape.CANDIDATES:
                keys, ids, weights, valid = load_candidates(
                    scale, cut, last, num_candidates, here, shape
                )
                measures = tl.where(by_mass == 1, weights, valid.to(tl.int64))
                cut, last = end_inside(keys, ids, measures, goal - above, low, high, shape.VOCAB)
                if by_mass == 1:
                    keep_candidates(
                        keys, ids, weights, cut, last, candidates.tile_sums, shape.WIDTH
                    )
                searching, summed = k < 0, by_mass == 1
            elif low == high:
                each = tl.full([], 1, tl.int64)
                if by_mass == 1:
                    each = weigh(_logit_of(low, shape.SHIFT), scale)
                n = _times(each, goal - above).to(tl.int32)
                cut, last = low, _nth_of_key(row, low, n, shape)
                searching, summed = k < 0, k < 0
            else:
                floor, ceiling = low, high
    if not summed:
        _mass_kept(row, scale, cut, last, candidates, shape)
    return cut, last
