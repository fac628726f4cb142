"""Draws tokens from rows of logits, without sorting the rows and without waiting for the host.

One program computes one distribution (a row of logits, and parameters that its samples share):

1. one pass over the row finds the statistics of `row_stats` and the largest edited logit;
2. one pass adds up the integer weights of each tile (`sampling_weights.py`) and, with top-k or
   top-p, collects candidates for the last kept token (`top_k_top_p.py`);
3. one draw per sample reads one tile.

With 16-bit logits, the two passes read 4 bytes per logit; greedy rows need only the first pass. For
flat rows, whose last kept token is not among the candidates, a second launch continues the search.
Weights are integers, so their sums are exact in any order, and no bit depends on other rows.

A draw returns the first token, by id, whose cumulative weight exceeds floor(u times the sum of kept
weights). The tile that contains this token is found from the sums of tiles. u is 24 random bits
from Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), divided by
2^24. The seed is the key, and (stream, sample index, position) is the counter.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import check_launchable
from batchinfer.kernels.penalties import EditedLogits
from batchinfer.kernels.row_stats import add_logits, merge_lanes
from batchinfer.kernels.sampling_weights import (
    LOWEST_KEY,
    RowShape,
    is_kept,
    load_logits,
    sort_keys,
    weigh,
)
from batchinfer.kernels.top_k_top_p import (
    Candidates,
    add_up,
    find_in_one_pass,
    first_low,
    search_last_kept,
)

NONFINITE, NO_TOKEN_LEFT = 1, 2
"""Reasons why a sample has no token: its logits contain NaN or infinity, or its edits forbid all
tokens."""

# Fuse only explicit fused multiply-adds, so that tokens are the same as on a CPU.
_OPTIONS = {"enable_fp_fusion": False}
# Programs that continue the search, or that read edited logits, have fewer warps, because their
# threads need more registers. Programs that read edited logits process half as many logits at a
# time.
_WARPS, _FEWER_WARPS = 16, 8
_LOGITS_AT_A_TIME = 4096
_SUMS_AT_A_TIME = tl.constexpr(1024)
_CANDIDATES = 256  # largest number of candidates that one pass stores per segment


class Distributions(NamedTuple):
    """The parameters of D distributions, which kernels take as one argument."""

    rows: torch.Tensor  # [D] int32
    temperature: torch.Tensor  # [D] float32
    min_p: torch.Tensor  # [D] float32
    top_p: torch.Tensor  # [D] float32
    top_k: torch.Tensor  # [D] int32


class Draws(NamedTuple):
    """The samples of each distribution, and the values that determine the samples' random numbers.
    Kernels take these tensors as one argument."""

    starts: torch.Tensor  # [D + 1] int32
    samples: torch.Tensor  # [k] int32
    seed: torch.Tensor  # [K] int64
    stream: torch.Tensor  # [K] int64
    sample_index: torch.Tensor  # [K] int32
    position: torch.Tensor  # [K] int32
    given: torch.Tensor | None  # [K] int32


class Samples(NamedTuple):
    """The output of K samples, which kernels take as one argument."""

    token_ids: torch.Tensor  # [K] int64
    logprobs: torch.Tensor  # [K] float32
    failures: torch.Tensor  # [K] int32


class _Scratch(NamedTuple):
    """Data that the first launch passes to the second."""

    tile_sums: torch.Tensor  # [D, NUM_TILES] int64
    candidate_logits: torch.Tensor  # [D, SEGMENTS, CANDIDATES] float32
    candidate_ids: torch.Tensor  # [D, SEGMENTS, CANDIDATES] int32
    top: torch.Tensor  # [D] float32, the largest edited logit
    # [D] int32: for a flat row, the lower end of the interval that was searched; else LOWEST_KEY.
    left_low: torch.Tensor
    left_masses: torch.Tensor  # [D, 2] int64: sum of weights in that interval, and of all weights


def sample(
    logits: torch.Tensor,  # [R, V], last dimension contiguous
    *,
    rows: torch.Tensor,  # [D] int32, the row of each distribution
    temperature: torch.Tensor,  # [D] float32, 0 = greedy
    min_p: torch.Tensor,  # [D] float32
    top_p: torch.Tensor,  # [D] float32
    top_k: torch.Tensor,  # [D] int32, 0 = all
    starts: torch.Tensor,  # [D + 1] int32, index in `samples` of each distribution's first sample
    samples: torch.Tensor,  # [k] int32, indices of samples
    seed: torch.Tensor,  # [K] int64
    stream: torch.Tensor,  # [K] int64
    sample_index: torch.Tensor,  # [K] int32
    position: torch.Tensor,  # [K] int32
    given: torch.Tensor | None = None,  # [K] int32, token to use instead of drawing; negative: draw
    edits: EditedLogits | None = None,
    draws: bool = True,  # true if a distribution has a temperature above 0
    filters: bool = True,  # true if a distribution has top-k or top-p
    maximum: torch.Tensor,  # [R] float32, as in `row_stats`
    max_logprob: torch.Tensor,  # [R] float32
    token_ids: torch.Tensor,  # [K] int64; 0 after a failure
    logprobs: torch.Tensor,  # [K] float32, computed from the model's logits; 0 after a failure
    failures: torch.Tensor,  # [K] int32: 0, NONFINITE or NO_TOKEN_LEFT
) -> None:
    """Draw the samples in `samples`, and write the statistics of the rows in `rows`."""
    check_launchable("sample", logits, rows, samples, token_ids)
    num_distributions, vocab = len(rows), logits.shape[1]
    if num_distributions == 0:
        return
    tile = tile_width(logits.dtype)
    num_tiles = triton.cdiv(vocab, tile)
    at_a_time = _LOGITS_AT_A_TIME if edits is None else _LOGITS_AT_A_TIME // 2
    segments = min(at_a_time // tile, triton.next_power_of_2(num_tiles))
    candidates = _CANDIDATES if filters and draws else 0
    shape = (
        *(vocab, _readable(logits), segments, tile, candidates),
        _unused_bits(logits.dtype) if edits is None else 0,
    )

    def scratch(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return logits.new_empty(num_distributions, *shape, dtype=dtype)

    arguments = (
        logits,
        logits.stride(0),
        Distributions(rows, temperature, min_p, top_p, top_k),
        edits,
        Draws(starts, samples, seed, stream, sample_index, position, given),
        _Scratch(
            tile_sums=scratch(num_tiles, dtype=torch.int64),
            candidate_logits=scratch(segments * candidates, dtype=torch.float32),
            candidate_ids=scratch(segments * candidates, dtype=torch.int32),
            top=scratch(dtype=torch.float32),
            left_low=scratch(dtype=torch.int32),
            left_masses=scratch(2, dtype=torch.int64),
        ),
        maximum,
        max_logprob,
        Samples(token_ids, logprobs, failures),
        RowShape(*map(tl.constexpr, shape)),
        draws,
    )
    grid = (num_distributions,)
    warps = _WARPS if edits is None else _FEWER_WARPS
    _sample_kernel[grid](*arguments, num_warps=warps, **_OPTIONS)
    if candidates:
        _sample_rest_kernel[grid](*arguments, num_warps=_FEWER_WARPS, **_OPTIONS)


def tile_width(dtype: torch.dtype) -> int:
    """Return the number of logits that a warp loads at once, with 16 bytes per thread."""
    return int(512 // dtype.itemsize)


def _readable(logits: torch.Tensor) -> int:
    """Return the number of elements of a row that may be read: a multiple of 16 if rows are padded
    to a multiple of 16 in memory, else the vocabulary size."""
    whole = -(-logits.shape[1] // 16) * 16
    padded = logits.stride(0) % 16 == 0 and logits.stride(0) >= whole
    end = logits.storage_offset() + (len(logits) - 1) * logits.stride(0) + whole
    fits = end * logits.element_size() <= logits.untyped_storage().nbytes()
    return whole if padded and fits else logits.shape[1]


def _unused_bits(dtype: torch.dtype) -> int:
    """Return the number of low bits that are 0 in every float32 number converted from `dtype`."""
    return {torch.bfloat16: 16, torch.float16: 13}.get(dtype, 0)


@triton.jit
def _scale_of(distribution, top, draws, distributions):
    # Use a temperature of at least 1e-30. Lower temperatures have the same effect, but their
    # reciprocals may be infinite.
    temperature = tl.load(distributions.temperature + distribution)
    temperature = tl.where(draws, tl.maximum(temperature, 1e-30), 1.0)
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), temperature)
    return (
        tl.where(draws, top, 0.0),
        temperature,
        inverse,
        tl.load(distributions.min_p + distribution),
    )


@triton.jit
def _top_k_of(distribution, distributions, shape):
    k = tl.load(distributions.top_k + distribution)
    return tl.where((k > 0) & (k < shape.VOCAB), k, 0)


@triton.jit
def _candidates_of(distribution, scratch, shape):
    offset = distribution * (shape.SEGMENTS * shape.CANDIDATES)
    num_tiles: tl.constexpr = (shape.VOCAB + shape.WIDTH - 1) // shape.WIDTH
    return Candidates(
        scratch.tile_sums + distribution * num_tiles,
        scratch.candidate_logits + offset,
        scratch.candidate_ids + offset,
    )


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _statistics(row, shape, STAGES: tl.constexpr):
    """Return the model's largest logit and its log-probability, each lane's largest edited logit,
    and the first column of the row's largest edited logit."""
    lanes = tl.arange(0, shape.SEGMENTS)[:, None] * shape.WIDTH + tl.arange(0, shape.WIDTH)[None]
    raw_best = tl.full([shape.SEGMENTS, shape.WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([shape.SEGMENTS, shape.WIDTH], tl.float32)
    raw_at = tl.zeros([shape.SEGMENTS, shape.WIDTH], tl.int32)
    best, best_at = raw_best, raw_at
    for start in tl.range(0, shape.VOCAB, shape.SEGMENTS * shape.WIDTH, num_stages=STAGES):
        columns = start + lanes
        raw, x = load_logits(row, columns, shape)
        raw_best, raw_at, total = add_logits(raw, columns, raw_best, raw_at, total)
        if row[1] is not None:
            x = tl.where(x != x, float("inf"), x)  # treat NaN like infinity: both are NONFINITE
            larger = x > best
            best, best_at = tl.where(larger, x, best), tl.where(larger, columns, best_at)
    maximum, max_logprob, chosen = merge_lanes(raw_best, raw_at, total, shape.VOCAB)
    if row[1] is None:
        best = raw_best
    else:
        chosen = tl.min(tl.where(best == tl.max(best), best_at, shape.VOCAB))
    return maximum, max_logprob, best, chosen


@triton.jit
def _random_bits(keys, sample):
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
    """Return the first token, by id, whose cumulative weight exceeds floor(sum * bits / 2^24)."""
    num_tiles: tl.constexpr = (shape.VOCAB + shape.WIDTH - 1) // shape.WIDTH
    lanes = tl.arange(0, _SUMS_AT_A_TIME)
    every = tl.full([], 0, tl.int64)
    for start in range(0, num_tiles, _SUMS_AT_A_TIME):
        in_range = start + lanes < num_tiles
        # Bypass the L1 cache, which atomic additions do not update.
        every += tl.sum(
            tl.load(tile_sums_ptr + start + lanes, mask=in_range, other=0, cache_modifier=".cg")
        )
    # Multiply in two parts, because the product does not fit in 63 bits.
    target = (every >> 24) * bits + ((every & 0xFFFFFF) * bits >> 24)
    tile, before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    seen = tl.full([], 0, tl.int64)
    for start in range(0, num_tiles, _SUMS_AT_A_TIME):
        in_range = start + lanes < num_tiles
        sums = tl.load(tile_sums_ptr + start + lanes, mask=in_range, other=0, cache_modifier=".cg")
        cumulative = seen + tl.cumsum(sums, 0)
        passed = in_range & (cumulative <= target)
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
def _write_samples(
    distribution,
    row,
    scale,
    cut,
    last,
    draws,  # true: draw tokens; false: use `likeliest`
    likeliest,
    failure,  # int32, the same for all samples
    maximum,  # of the model's logits
    max_logprob,
    keys,  # Draws
    candidates,  # Candidates
    outputs,  # Samples
    shape,  # RowShape
    DRAWS: tl.constexpr,
):
    first, end = tl.load(keys.starts + distribution), tl.load(keys.starts + distribution + 1)
    for place in range(first, end):
        sample = tl.load(keys.samples + place)
        token = likeliest
        if DRAWS:  # noqa: SIM102 - a compile-time condition, unlike the next one
            if draws:
                bits = _random_bits(keys, sample)
                token = _draw(row, scale, cut, last, bits, candidates.tile_sums, shape)
        if keys.given is not None:
            given = tl.load(keys.given + sample)
            token = tl.where(given >= 0, given, token)
        token = tl.where(failure == 0, token, 0)
        logprob = (tl.load(row[0] + token).to(tl.float32) - maximum) + max_logprob
        tl.store(outputs.token_ids + sample, token.to(tl.int64))
        tl.store(outputs.logprobs + sample, tl.where(failure == 0, logprob, 0.0))
        tl.store(outputs.failures + sample, failure)


@triton.jit
def _sample_kernel(
    logits_ptr,  # [R, V]
    row_stride,
    distributions,  # Distributions
    edits,  # EditedLogits or None
    keys,  # Draws
    scratch,  # _Scratch
    maximum_ptr,  # [R] float32
    max_logprob_ptr,  # [R] float32
    outputs,  # Samples
    shape,  # RowShape
    DRAWS: tl.constexpr,
):
    distribution = tl.program_id(0).to(tl.int64)
    at = tl.load(distributions.rows + distribution).to(tl.int64)
    # (Both kernels repeat these lines: in Triton 3.6 no function can return a tuple with None.)
    row = (logits_ptr + at * row_stride, None, None, False)
    if edits is not None:
        row = (
            logits_ptr + at * row_stride,
            edits.logits + distribution * shape.VOCAB,
            edits.present + distribution * ((shape.VOCAB + 31) // 32),
            tl.load(edits.restricted + distribution) != 0,
        )
    maximum, max_logprob, best, likeliest = _statistics(row, shape, 4 if shape.CANDIDATES else 1)
    tl.store(maximum_ptr + at, maximum)
    tl.store(max_logprob_ptr + at, max_logprob)
    top = tl.max(best)
    failure = tl.where(_is_finite(maximum) & (top == float("-inf")), 2, 1)
    failure = tl.where(_is_finite(maximum) & _is_finite(top), 0, failure)

    cut, last = tl.full([], LOWEST_KEY, tl.int32), tl.full([], shape.VOCAB, tl.int32)
    scale = (top, top, top, top)
    draws, done = failure < 0, failure >= 0
    candidates = _candidates_of(distribution, scratch, shape)
    if DRAWS:
        draws = (tl.load(distributions.temperature + distribution) > 0) & (failure == 0)
        scale = _scale_of(distribution, top, draws, distributions)
        if shape.CANDIDATES == 0:
            if draws:
                add_up(row, scale, cut, last, cut, cut, candidates, shape)
        else:
            low = cut
            if draws:
                k = _top_k_of(distribution, distributions, shape)
                lanes = sort_keys(best, shape.SHIFT)
                top_key = tl.max(lanes)
                low = first_low(lanes, top_key, k)
                cut, last, done, inside, every = find_in_one_pass(
                    row,
                    scale,
                    k,
                    tl.load(distributions.top_p + distribution),
                    low,
                    top_key,
                    candidates,
                    shape,
                )
                tl.store(scratch.left_masses + 2 * distribution, inside)
                tl.store(scratch.left_masses + 2 * distribution + 1, every)
            tl.store(scratch.top + distribution, top)
            tl.store(scratch.left_low + distribution, tl.where(done, LOWEST_KEY, low))
    if done:
        _write_samples(
            distribution, row, scale, cut, last, draws, likeliest, failure, maximum, max_logprob,
            keys, candidates, outputs, shape, DRAWS,
        )  # fmt: skip


@triton.jit
def _sample_rest_kernel(
    logits_ptr,  # [R, V]
    row_stride,
    distributions,  # Distributions
    edits,  # EditedLogits or None
    keys,  # Draws
    scratch,  # _Scratch
    maximum_ptr,  # [R] float32
    max_logprob_ptr,  # [R] float32
    outputs,  # Samples
    shape,  # RowShape
    DRAWS: tl.constexpr,
):
    distribution = tl.program_id(0).to(tl.int64)
    low = tl.load(scratch.left_low + distribution)
    if low != LOWEST_KEY:
        at = tl.load(distributions.rows + distribution).to(tl.int64)
        row = (logits_ptr + at * row_stride, None, None, False)
        if edits is not None:
            row = (
                logits_ptr + at * row_stride,
                edits.logits + distribution * shape.VOCAB,
                edits.present + distribution * ((shape.VOCAB + 31) // 32),
                tl.load(edits.restricted + distribution) != 0,
            )
        top = tl.load(scratch.top + distribution)
        scale = _scale_of(distribution, top, top == top, distributions)
        candidates = _candidates_of(distribution, scratch, shape)
        cut, last = search_last_kept(
            row, scale, _top_k_of(distribution, distributions, shape),
            tl.load(distributions.top_p + distribution), low, sort_keys(top, shape.SHIFT),
            scratch.left_masses + 2 * distribution, candidates, shape,
        )  # fmt: skip
        _write_samples(
            distribution, row, scale, cut, last, True, cut, cut * 0,
            tl.load(maximum_ptr + at), tl.load(max_logprob_ptr + at),
            keys, candidates, outputs, shape, DRAWS,
        )  # fmt: skip
