"""Draw tokens of a row whose tiles' weights are known, and write them.

The token is the first, by id, whose cumulative weight exceeds floor(u times all kept weights); its
tile is found first, by the sums of tiles. u has 24 bits of Philox-4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3") with the seed as key and (stream, sample index,
position) as counter.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from batchinfer.kernels.sampling_weights import is_kept, load_logits, sort_keys, weigh

_SUMS_AT_A_TIME = tl.constexpr(1024)


class Draws(NamedTuple):
    """Samples of each distribution, and the keys of their random numbers; one argument."""

    starts: torch.Tensor  # [D + 1] int32
    samples: torch.Tensor  # [k] int32
    seed: torch.Tensor  # [K] int64
    stream: torch.Tensor  # [K] int64
    sample_index: torch.Tensor  # [K] int32
    position: torch.Tensor  # [K] int32
    given: torch.Tensor | None  # [K] int32


class Samples(NamedTuple):
    """The samples written; one argument."""

    token_ids: torch.Tensor  # [K] int64
    logprobs: torch.Tensor  # [K] float32
    failures: torch.Tensor  # [K] int32


@triton.jit
def _random_bits(keys, sample):
    """24 random bits, int64."""
    stream = tl.load(keys.stream + sample)
    words = tl.philox(
        tl.load(keys.seed + sample),
        (stream & 0xFFFFFFFF).to(tl.uint32),
        ((stream >> 32) & 0xFFFFFFFF).to(tl.uint32),
        tl.load(keys.sample_index + sample).to(tl.uint32),
        tl.load(keys.position + sample).to(tl.uint32),
    )
    return (words[0] >> 8).to(tl.int64)


@triton.jit
def _draw(row, scale, cut, last, bits, tile_sums_ptr, shape):
    """The first token whose cumulative weight is over floor(all * bits / 2^24)."""
    num_tiles: tl.constexpr = (shape.VOCAB + shape.WIDTH - 1) // shape.WIDTH
    lanes = tl.arange(0, _SUMS_AT_A_TIME)
    every = tl.full([], 0, tl.int64)
    for start in range(0, num_tiles, _SUMS_AT_A_TIME):
        there = start + lanes < num_tiles
        # Past the L1 cache, which atomic additions do not update.
        every += tl.sum(
            tl.load(tile_sums_ptr + start + lanes, mask=there, other=0, cache_modifier=".cg")
        )
    # In halves: the product does not fit in 63 bits.
    target = (every >> 24) * bits + ((every & 0xFFFFFF) * bits >> 24)
    tile, before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    seen = tl.full([], 0, tl.int64)
    for start in range(0, num_tiles, _SUMS_AT_A_TIME):
        there = start + lanes < num_tiles
        sums = tl.load(tile_sums_ptr + start + lanes, mask=there, other=0, cache_modifier=".cg")
        cumulative = seen + tl.cumsum(sums, 0)
        passed = there & (cumulative <= target)
        tile += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, cumulative, tl.zeros_like(sums))))
        seen += tl.sum(sums)
    columns = tile * shape.WIDTH + tl.arange(0, shape.WIDTH)
    _, x = load_logits(row, columns, shape)
    weights = weigh(x, scale)
    kept = (columns < shape.VOCAB) & is_kept(sort_keys(x, shape.SHIFT), columns, cut, last)
    cumulative = before + tl.cumsum(tl.where(kept, weights, tl.zeros_like(weights)), 0)
    return tile * shape.WIDTH + tl.sum((cumulative <= target).to(tl.int32))


@triton.jit
def write_samples(
    distribution,
    row,
    scale,
    cut,
    last,
    draws,  # whether tokens are drawn; else `likeliest` is taken
    likeliest,
    failure,  # int32, of them all: 0, or why there is no token
    maximum,  # of the model's logits, and its log-probability
    max_logprob,
    keys,  # Draws
    found,  # Found
    outputs,  # Samples
    shape,  # RowShape
    DRAWS: tl.constexpr,
):
    """Write the samples of a distribution."""
    first, end = tl.load(keys.starts + distribution), tl.load(keys.starts + distribution + 1)
    for place in range(first, end):
        sample = tl.load(keys.samples + place)
        token = likeliest
        if DRAWS:  # noqa: SIM102 - known when it is compiled, the other is not
            if draws:
                bits = _random_bits(keys, sample)
                token = _draw(row, scale, cut, last, bits, found.tile_sums, shape)
        if keys.given is not None:
            given = tl.load(keys.given + sample)
            token = tl.where(given >= 0, given, token)
        token = tl.where(failure == 0, token, 0)
        logprob = (tl.load(row[0] + token).to(tl.float32) - maximum) + max_logprob
        tl.store(outputs.token_ids + sample, token.to(tl.int64))
        tl.store(outputs.logprobs + sample, tl.where(failure == 0, logprob, 0.0))
        tl.store(outputs.failures + sample, failure)
