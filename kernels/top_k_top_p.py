"""Top-k and top-p of a row of logits, exactly, without sorting it.

The most likely tokens are a prefix of one total order: larger logits first, equal logits by
ascending id (-0 equals 0). The tokens kept are given by the last one, a key and an id. Top-k is the
prefix of k tokens. Top-p is its shortest prefix with

    float64(mass of the prefix) >= float64(top_p) float64(mass of what top-k keeps)

in integer weights, so that ties and sums are as on a CPU (Holtzman et al. 2020, arXiv:1904.09751).

A pass over the row adds up the weights above an interval of keys and writes the tokens inside it
("found"). If the prefix ends inside and all of it was written, its end is searched there, by
halving the interval. The first interval holds the k largest of the lanes' maxima, 1,024 for top-p
alone, and so k tokens at least: one pass is enough unless a row is flat. Those rows are left to
`top_k_top_p_search.py`.

Read for it: the pivots of RTop-K and Qrita (Park et al. 2026, arXiv:2602.01518; vLLM,
vllm/v1/sample/ops/topk_topp_triton.py), and the rejection sampling of FlashInfer
(include/flashinfer/sampling.cuh), whose tokens are others than those of an inverse distribution.
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
# No two programs fit on a multiprocessor, so that one has to keep its memory busy.
_STAGES: tl.constexpr = tl.constexpr(3)


class Found(NamedTuple):
    """What a pass over a row writes; the tokens of an interval by segments."""

    tile_sums: torch.Tensor  # [NUM_TILES] int64: of each tile what is kept above the interval
    logits: torch.Tensor  # [SEGMENTS, FOUND] float32
    ids: torch.Tensor  # [SEGMENTS, FOUND] int32


@triton.jit
def add_up(
    row,  # as `load_logits` takes it
    scale,  # as `weigh` takes it
    cut,  # key and
    last,  # id of the last token kept so far
    low,  # interval of keys
    high,
    found,  # Found
    shape,  # RowShape; without filters all tokens are above the interval
    STAGES: tl.constexpr = 1,  # loads under way
):
    """One pass; how many tokens above the interval, how many in each segment inside it, and the
    weights above, inside and in all."""
    segments = tl.arange(0, shape.SEGMENTS)
    tokens_above = tl.zeros([shape.SEGMENTS], tl.int32)
    num_found = tl.zeros([shape.SEGMENTS], tl.int32)
    above = tl.zeros([shape.SEGMENTS], tl.int64)
    inside = tl.zeros([shape.SEGMENTS], tl.int64)
    every = tl.zeros([shape.SEGMENTS], tl.int64)
    for start in tl.range(0, shape.VOCAB, shape.SEGMENTS * shape.WIDTH, num_stages=STAGES):
        columns = start + segments[:, None] * shape.WIDTH + tl.arange(0, shape.WIDTH)[None]
        _, x = load_logits(row, columns, shape)
        if shape.FOUND == 0:
            sums = tl.sum(weigh(x, scale), 1)
        else:
            keys = sort_keys(x, shape.SHIFT)
            kept = (columns < shape.VOCAB) & is_kept(keys, columns, cut, last)
            is_above = kept & (keys > high)
            is_inside = kept & (keys >= low) & (keys <= high)
            count = is_inside.to(tl.int32)
            place = num_found[:, None] + tl.cumsum(count, 1) - 1
            at = segments[:, None] * shape.FOUND + place
            tl.store(found.logits + at, x, mask=is_inside & (place < shape.FOUND))
            tl.store(found.ids + at, columns, mask=is_inside & (place < shape.FOUND))
            num_found += tl.sum(count, 1)
            tokens_above += tl.sum(is_above.to(tl.int32), 1)
            weights = weigh(x, scale)
            nothing = tl.zeros_like(weights)
            sums = tl.sum(tl.where(is_above, weights, nothing), 1)
            inside += tl.sum(tl.where(is_inside, weights, nothing), 1)
            every += tl.sum(tl.where(kept, weights, nothing), 1)
        above += sums
        tiles = start // shape.WIDTH + segments
        tl.store(found.tile_sums + tiles, sums, mask=tiles * shape.WIDTH < shape.VOCAB)
    tl.debug_barrier()  # every thread reads what others have written
    return tl.sum(tokens_above), num_found, tl.sum(above), tl.sum(inside), tl.sum(every)


@triton.jit
def goal_of_share(share, every):
    """The least mass that reaches the share, compared in float64; at least 1."""
    target = share.to(tl.float64) * every.to(tl.float64)
    goal = target.to(tl.int64) + 512
    # Up to 2^62 there are up to 512 integers to a float64.
    for doubling in tl.static_range(10):
        less = goal - (512 >> doubling)
        goal = tl.where(less.to(tl.float64) >= target, less, goal)
    return tl.maximum(goal, 1)


@triton.jit
def first_low(keys, top_key, k):
    """Lower end of the first interval, over LOWEST_KEY: at least `k` tokens, or all, are not below.

    Args:
        keys: those of the lanes' maxima.
        top_key: the largest.
        k: 0 without top-k.
    """
    most = tl.where(k > 0, k, _FIRST_TOKENS).to(tl.int64)
    ones = tl.full(keys.shape, 1, tl.int64)
    least = tl.full([], LOWEST_KEY + 1, tl.int32)
    return last_reaching(keys, ones, most, least, top_key)


@triton.jit
def end_inside(keys, ids, measures, goal, low, high, VOCAB: tl.constexpr):
    """The last token, key and id, of the prefix whose measures reach the goal."""
    cut = last_reaching(keys, measures, goal, low, high)
    nothing = tl.zeros_like(measures)
    goal -= tl.sum(tl.where(keys > cut, measures, nothing))
    equals = tl.where(keys == cut, measures, nothing)
    none, all_ids = tl.full([], -VOCAB, tl.int32), tl.full([], 0, tl.int32)
    return cut, -last_reaching(-ids, equals, goal, none, all_ids)


@triton.jit
def load_found(scale, cut, last, num_found, found, shape):
    """Keys, ids and weights of the tokens found, [SEGMENTS, FOUND], and which of them exist."""
    places = tl.arange(0, shape.FOUND)[None]
    there = places < num_found[:, None]
    at = tl.arange(0, shape.SEGMENTS)[:, None] * shape.FOUND + places
    x = tl.load(found.logits + at, mask=there, other=float("-inf"))
    ids = tl.load(found.ids + at, mask=there, other=0)
    keys = sort_keys(x, shape.SHIFT)
    weights = weigh(x, scale)
    there = there & is_kept(keys, ids, cut, last)
    return keys, ids, tl.where(there, weights, tl.zeros_like(weights)), there


@triton.jit
def keep_found(keys, ids, weights, cut, last, tile_sums_ptr, WIDTH: tl.constexpr):
    """Add the weights of the tokens kept to the sums of their tiles."""
    kept = is_kept(keys, ids, cut, last)  # weighs 0 where nothing was found
    tl.atomic_add(tile_sums_ptr + ids // WIDTH, weights, mask=kept)
    tl.debug_barrier()


@triton.jit
def find_in_one_pass(
    row,
    scale,
    k,  # tokens that top-k keeps; 0 = all
    top_p,
    low,  # of the interval whose upper end is the largest key, from `first_low`
    top_key,
    found,  # Found; the sums of tiles become those of what is kept
    shape,  # RowShape
):
    """Key and id of the last token that top-k and then top-p keep, and whether it was found; and
    the weights inside the interval and in all."""
    lowest, every_id = tl.full([], LOWEST_KEY, tl.int32), tl.full([], shape.VOCAB, tl.int32)
    cut, last = lowest, every_id
    filtered = (k > 0) | (top_p < 1.0)
    # With nothing to filter all is above.
    low, high = tl.where(filtered, low, lowest), tl.where(filtered, top_key, lowest)
    _, num_found, _, inside, every = add_up(row, scale, cut, last, low, high, found, shape, _STAGES)
    done = ~filtered
    if filtered & (tl.max(num_found) <= shape.FOUND):
        keys, ids, weights, there = load_found(scale, cut, last, num_found, found, shape)
        mass = every
        if k > 0:
            cut, last = end_inside(
                keys, ids, there.to(tl.int64), k.to(tl.int64), low, high, shape.VOCAB
            )
            weights = tl.where(is_kept(keys, ids, cut, last), weights, tl.zeros_like(weights))
            mass = tl.sum(weights)
        goal = goal_of_share(top_p, mass)
        done = (k > 0) | (inside >= goal)
        if done:
            cut, last = end_inside(keys, ids, weights, goal, low, high, shape.VOCAB)
            keep_found(keys, ids, weights, cut, last, found.tile_sums, shape.WIDTH)
    return cut, last, done, inside, every
