"""Top-k and top-p of flat rows of logits, whose last token kept is not among the first found.

The prefix of `sampling_filter` is known to end in an interval of keys. A sample of the row
estimates where; a pass over the row adds up what is above a smaller interval there and writes down
its tokens. This repeats, by halving where samples were wrong too often, down to one key, whose
tokens are counted off by id.

Most rows take one such pass, of as many bytes as the row. 32 would be the most.
"""

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
from batchinfer.kernels.top_k_top_p import (
    Found,
    add_up,
    end_inside,
    goal_of_share,
    keep_found,
    load_found,
)

# The error of a sample, up or down, as a share of all that is kept: about its deviation. More would
# find more tokens than there is room for.
_MARGIN: tl.constexpr = tl.constexpr(1 / 200)
_PASSES_BY_SAMPLE: tl.constexpr = tl.constexpr(5)


@triton.jit
def _logit_of(key, SHIFT: tl.constexpr):
    """The float32 of a key; the inverse of `sort_keys`."""
    key = (key << SHIFT) | tl.where(key < 0, 2**SHIFT - 1, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _times(each, goal):
    """How many times `each` has to be added to reach the goal, at most 2^22.

    (A division of 64 bits is a call, for which the compiler keeps a stack.)
    """
    less = tl.full([], 0, tl.int64)
    for doubling in tl.static_range(22):
        more = less + (2097152 >> doubling)
        less = tl.where(more * each < goal, more, less)
    return less + 1


@triton.jit
def _nth_of_key(row, key, n, shape):
    """Id of the n-th token of a key, from 1, in a pass over the row."""
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
    """An interval inside of [low, high] around the estimated place of the goal.

    The sample is one tile of the row for each segment. Its part above the key `known` is not
    needed: the measure there is known. `measured` is that of all that is kept.
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
def _mass_kept(row, scale, cut, last, found, shape):
    """The weights of what is kept; those of each tile are written."""
    lowest = tl.full([], LOWEST_KEY, tl.int32)
    _, _, every, _, _ = add_up(row, scale, cut, last, lowest, lowest, found, shape)
    return every


@triton.jit
def search_last_kept(
    row,
    scale,
    k,  # tokens that top-k keeps; 0 = all
    top_p,
    first_low,  # the interval that was looked at in vain: it ends at the largest key
    top_key,
    masses_ptr,  # [2] int64: the weights inside of it, and in all
    found,  # Found; the sums of tiles become those of what is kept
    shape,  # RowShape
):
    """Key and id of the last token that top-k and then top-p keep."""
    lowest = tl.full([], LOWEST_KEY, tl.int32)
    cut, last = lowest, tl.full([], shape.VOCAB, tl.int32)
    summed = k < 0
    for by_mass in range(0, 2):
        searching = (by_mass == 1) | (k > 0)
        # Inside were more tokens than there was room for; or not the end of top-p alone.
        floor, ceiling, passes = first_low, top_key, tl.full([], 0, tl.int32)
        goal, measured = k.to(tl.int64), tl.full([], shape.VOCAB, tl.int64)
        known, known_above = top_key, tl.full([], 0, tl.int64)
        if by_mass == 1:
            inside, every = tl.load(masses_ptr), tl.load(masses_ptr + 1)
            if k > 0:
                floor, every = cut, _mass_kept(row, scale, cut, last, found, shape)
            goal, measured = goal_of_share(top_p, every), every
            if (k == 0) & (inside < goal):
                floor, ceiling = lowest, first_low - 1
                known, known_above = ceiling, inside
        while searching:
            # Moved by 0, which a compiler cannot know: it would keep constant addresses in
            # registers through all passes, and there are too few.
            nothing = tl.minimum(passes, 0)
            here = Found(found.tile_sums, found.logits + nothing, found.ids + nothing)
            low = (floor.to(tl.int64) + (ceiling.to(tl.int64) - floor + 1) // 2).to(tl.int32)
            high = ceiling
            if passes < _PASSES_BY_SAMPLE:
                low, high = _interval_by_sample(
                    row, scale, cut, last, by_mass == 1, known, known_above, goal, measured,
                    floor, ceiling, shape,
                )  # fmt: skip
            tokens, num_found, mass, mass_inside, _ = add_up(
                row, scale, cut, last, low, high, here, shape
            )
            passes += 1
            above, through = tokens.to(tl.int64), (tokens + tl.sum(num_found)).to(tl.int64)
            if by_mass == 1:
                above, through = mass, mass + mass_inside
            known, known_above = high, above
            if above >= goal:
                floor = high + 1
            elif through < goal:
                ceiling, known, known_above = low - 1, low - 1, through
            elif tl.max(num_found) <= shape.FOUND:
                keys, ids, weights, there = load_found(scale, cut, last, num_found, here, shape)
                measures = tl.where(by_mass == 1, weights, there.to(tl.int64))
                cut, last = end_inside(keys, ids, measures, goal - above, low, high, shape.VOCAB)
                if by_mass == 1:
                    keep_found(keys, ids, weights, cut, last, found.tile_sums, shape.WIDTH)
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
        _mass_kept(row, scale, cut, last, found, shape)
    return cut, last
