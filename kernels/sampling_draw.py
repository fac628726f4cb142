"""Drawing a token where the weights of a row's tiles are known, and writing down its samples.

The token is the first, by id, whose cumulative weight is over floor(u times all that is kept); its
tile is found first, by the sums of tiles. u has 24 bits of Philox-4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3") with the seed as key and (stream, sample index,
position) as counter.
"""

import triton
import triton.language as tl

from batchinfer.kernels.sampling_row import is_kept, load_logits, sort_keys, weigh

_SUMS_AT_A_TIME = tl.constexpr(1024)


@triton.jit
def _random_bits(seed_ptr, stream_ptr, sample_index_ptr, position_ptr, sample):
    """24 random bits, int64."""
    stream = tl.load(stream_ptr + sample)
    words = tl.philox(
        tl.load(seed_ptr + sample),
        (stream & 0xFFFFFFFF).to(tl.uint32),
        ((stream >> 32) & 0xFFFFFFFF).to(tl.uint32),
        tl.load(sample_index_ptr + sample).to(tl.uint32),
        tl.load(position_ptr + sample).to(tl.uint32),
    )
    return (words[0] >> 8).to(tl.int64)


@triton.jit
def _draw(
    row, scale, cut, last, bits, tile_sums_ptr,
    VOCAB: tl.constexpr, READABLE: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The first token whose cumulative weight is over floor(all * bits / 2^24)."""
    num_tiles: tl.constexpr = (VOCAB + WIDTH - 1) // WIDTH
    lanes = tl.arange(0, _SUMS_AT_A_TIME)
    every = tl.full([], 0, tl.int64)
    for start in range(0, num_tiles, _SUMS_AT_A_TIME):
        there = start + lanes < num_tiles
        # From where atomic additions left them, past what may be cached of them.
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
    columns = tile * WIDTH + tl.arange(0, WIDTH)
    _, x = load_logits(row[0], row[1], row[2], row[3], columns, VOCAB, READABLE)
    weights = weigh(x, scale[0], scale[1], scale[2], scale[3])
    kept = (columns < VOCAB) & is_kept(sort_keys(x, SHIFT), columns, cut, last)
    cumulative = before + tl.cumsum(tl.where(kept, weights, tl.zeros_like(weights)), 0)
    return tile * WIDTH + tl.sum((cumulative <= target).to(tl.int32))


@triton.jit
def write_samples(
    row,
    scale,
    cut,
    last,
    draws,  # whether tokens are drawn; else `likeliest` is taken
    likeliest,
    failure,  # int32, of them all: 0, or why there is no token
    maximum,  # of the model's logits, and its log-probability
    max_logprob,
    first,  # of the samples, and the end of them
    end,
    samples_ptr,  # [k] int32
    keys,  # pointers: seed [K] int64, stream [K] int64, sample_index [K] int32, position [K] int32
    given_ptr,  # [K] int32 or None
    tile_sums_ptr,  # [NUM_TILES] int64
    outputs,  # pointers: token_ids [K] int64, logprobs [K] float32, failures [K] int32
    VOCAB: tl.constexpr,
    READABLE: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Write the samples of a distribution."""
    for place in range(first, end):
        sample = tl.load(samples_ptr + place)
        token = likeliest
        if DRAWS:  # noqa: SIM102 - known when it is compiled, the other is not
            if draws:
                bits = _random_bits(keys[0], keys[1], keys[2], keys[3], sample)
                token = _draw(
                    row, scale, cut, last, bits, tile_sums_ptr, VOCAB, READABLE, WIDTH, SHIFT
                )  # fmt: skip
        if given_ptr is not None:
            given = tl.load(given_ptr + sample)
            token = tl.where(given >= 0, given, token)
        token = tl.where(failure == 0, token, 0)
        logprob = (tl.load(row[0] + token).to(tl.float32) - maximum) + max_logprob
        tl.store(outputs[0] + sample, token.to(tl.int64))
        tl.store(outputs[1] + sample, tl.where(failure == 0, logprob, 0.0))
        tl.store(outputs[2] + sample, failure)
