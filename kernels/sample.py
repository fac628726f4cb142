"""Sampling: from rows of logits to tokens, without a sort and without the host.

A program takes a distribution (a row of logits and the parameters that its samples share):

1. a pass over the row: the statistics of `row_stats`, and the largest edited logit and its place;
2. a pass for the weights of its tiles (`sampling_row`), and with filters for the tokens that can be
   the last kept (`sampling_filter`);
3. for each sample a draw (`sampling_draw`), which reads one tile.

So 16-bit logits cost 4 bytes each, greedy rows 2. A second, small launch has work for flat rows
alone, whose last kept token was not found in one pass (`sampling_search`). No bit depends on
other rows: weights are integers, whose sums are exact in any order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import check_launchable
from batchinfer.kernels.penalties import EditedLogits
from batchinfer.kernels.row_stats import add_logits, merge_lanes
from batchinfer.kernels.sampling_draw import Draws, Samples, write_samples
from batchinfer.kernels.sampling_weights import LOWEST_KEY, RowShape, load_logits, sort_keys
from batchinfer.kernels.top_k_top_p import Found, add_up, find_in_one_pass, first_low
from batchinfer.kernels.top_k_top_p_search import search_last_kept

NONFINITE, NO_TOKEN_LEFT = 1, 2
"""Why a sample has no token: its logits hold NaN or infinity; its edits leave none."""

# Only what is written as a fused multiply-add is one, so that tokens are those of a CPU.
_OPTIONS = {"enable_fp_fusion": False}
# The search, and edited logits, have no registers for more warps; edited ones take half the logits.
_WARPS, _FEWER_WARPS = 16, 8
_LOGITS_AT_A_TIME = 4096
_FOUND = 256  # tokens of a segment that can be written down in a pass


class Distributions(NamedTuple):
    """The parameters of D distributions; a kernel takes them as one argument."""

    rows: torch.Tensor  # [D] int32
    temperature: torch.Tensor  # [D] float32
    min_p: torch.Tensor  # [D] float32
    top_p: torch.Tensor  # [D] float32
    top_k: torch.Tensor  # [D] int32


class _Scratch(NamedTuple):
    """What the first launch leaves to the second."""

    tile_sums: torch.Tensor  # [D, NUM_TILES] int64
    found_values: torch.Tensor  # [D, SEGMENTS, FOUND] float32
    found_ids: torch.Tensor  # [D, SEGMENTS, FOUND] int32
    top: torch.Tensor  # [D] float32, the largest edited logit
    left_low: torch.Tensor  # [D] int32: lower end of a flat row's interval, else LOWEST_KEY
    left_masses: torch.Tensor  # [D, 2] int64: the weights inside of it, and in all


def sample(
    logits: torch.Tensor,  # [R, V], last dimension contiguous
    *,
    rows: torch.Tensor,  # [D] int32, the row of each distribution
    temperature: torch.Tensor,  # [D] float32, 0 = the most likely token
    min_p: torch.Tensor,  # [D] float32
    top_p: torch.Tensor,  # [D] float32
    top_k: torch.Tensor,  # [D] int32, 0 = all
    starts: torch.Tensor,  # [D + 1] int32, where the samples of each distribution begin
    samples: torch.Tensor,  # [k] int32, which of the K
    seed: torch.Tensor,  # [K] int64
    stream: torch.Tensor,  # [K] int64
    sample_index: torch.Tensor,  # [K] int32
    position: torch.Tensor,  # [K] int32
    given: torch.Tensor | None = None,  # [K] int32, a token that is not drawn; negative: drawn
    edits: EditedLogits | None = None,
    draws: bool = True,  # whether any distribution is drawn from: has a temperature
    filters: bool = True,  # whether any has top-k or top-p
    maximum: torch.Tensor,  # [R] float32, as `row_stats` gives it
    max_logprob: torch.Tensor,  # [R] float32
    token_ids: torch.Tensor,  # [K] int64
    logprobs: torch.Tensor,  # [K] float32, of the token by the model's logits
    failures: torch.Tensor,  # [K] int32: 0, NONFINITE or NO_TOKEN_LEFT; then token and log-
    #                          probability are 0
) -> None:
    """Write the samples that are named, and the statistics of the rows that are."""
    check_launchable("sample", logits, rows, samples, token_ids)
    num_distributions, vocab = len(rows), logits.shape[1]
    if num_distributions == 0:
        return
    tile = tile_width(logits.dtype)
    num_tiles = triton.cdiv(vocab, tile)
    at_a_time = _LOGITS_AT_A_TIME if edits is None else _LOGITS_AT_A_TIME // 2
    segments = min(at_a_time // tile, triton.next_power_of_2(num_tiles))
    found = _FOUND if filters and draws else 0
    shape = (
        *(vocab, _readable(logits), segments, tile, found),
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
            found_values=scratch(segments * found, dtype=torch.float32),
            found_ids=scratch(segments * found, dtype=torch.int32),
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
    if found:
        _sample_rest_kernel[grid](*arguments, num_warps=_FEWER_WARPS, **_OPTIONS)


def tile_width(dtype: torch.dtype) -> int:
    """Logits that a warp loads at once, 16 bytes a thread."""
    return int(512 // dtype.itemsize)


def _readable(logits: torch.Tensor) -> int:
    """Elements of a row that may be read: whole vectors, where rows are padded to that."""
    whole = -(-logits.shape[1] // 16) * 16
    padded = logits.stride(0) % 16 == 0 and logits.stride(0) >= whole
    end = logits.storage_offset() + (len(logits) - 1) * logits.stride(0) + whole
    fits = end * logits.element_size() <= logits.untyped_storage().nbytes()
    return whole if padded and fits else logits.shape[1]


def _unused_bits(dtype: torch.dtype) -> int:
    """Low bits that are the same in every float32 made of the type."""
    return {torch.bfloat16: 16, torch.float16: 13}.get(dtype, 0)


@triton.jit
def _scale_of(distribution, top, draws, distributions):
    """The arguments of `weigh` that are the distribution's."""
    # Smaller temperatures mean the same as 1e-30; their reciprocals are infinite.
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
def _found_of(distribution, scratch, shape):
    offset = distribution * (shape.SEGMENTS * shape.FOUND)
    num_tiles: tl.constexpr = (shape.VOCAB + shape.WIDTH - 1) // shape.WIDTH
    return Found(
        scratch.tile_sums + distribution * num_tiles,
        scratch.found_values + offset,
        scratch.found_ids + offset,
    )


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _statistics(row, shape, STAGES: tl.constexpr):
    """Maximum of the model's logits and its log-probability; the lanes' largest edited logits, and
    where the largest first is."""
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
            x = tl.where(x != x, float("inf"), x)  # neither can be drawn from
            larger = x > best
            best, best_at = tl.where(larger, x, best), tl.where(larger, columns, best_at)
    maximum, max_logprob, chosen = merge_lanes(raw_best, raw_at, total, shape.VOCAB)
    if row[1] is None:
        best = raw_best
    else:
        chosen = tl.min(tl.where(best == tl.max(best), best_at, shape.VOCAB))
    return maximum, max_logprob, best, chosen


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
    # (Both kernels have these lines: Triton 3.6 has no function that returns a tuple with None.)
    row = (logits_ptr + at * row_stride, None, None, False)
    if edits is not None:
        row = (
            logits_ptr + at * row_stride,
            edits.logits + distribution * shape.VOCAB,
            edits.present + distribution * ((shape.VOCAB + 31) // 32),
            tl.load(edits.restricted + distribution) != 0,
        )
    maximum, max_logprob, best, likeliest = _statistics(row, shape, 4 if shape.FOUND else 1)
    tl.store(maximum_ptr + at, maximum)
    tl.store(max_logprob_ptr + at, max_logprob)
    top = tl.max(best)
    failure = tl.where(_is_finite(maximum) & (top == float("-inf")), 2, 1)
    failure = tl.where(_is_finite(maximum) & _is_finite(top), 0, failure)

    cut, last = tl.full([], LOWEST_KEY, tl.int32), tl.full([], shape.VOCAB, tl.int32)
    scale = (top, top, top, top)
    draws, done = failure < 0, failure >= 0
    found = _found_of(distribution, scratch, shape)
    if DRAWS:
        draws = (tl.load(distributions.temperature + distribution) > 0) & (failure == 0)
        scale = _scale_of(distribution, top, draws, distributions)
        if shape.FOUND == 0:
            if draws:
                add_up(row, scale, cut, last, cut, cut, found, shape)
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
                    found,
                    shape,
                )
                tl.store(scratch.left_masses + 2 * distribution, inside)
                tl.store(scratch.left_masses + 2 * distribution + 1, every)
            tl.store(scratch.top + distribution, top)
            tl.store(scratch.left_low + distribution, tl.where(done, LOWEST_KEY, low))
    if done:
        write_samples(
            distribution, row, scale, cut, last, draws, likeliest, failure, maximum, max_logprob,
            keys, found, outputs, shape, DRAWS,
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
        found = _found_of(distribution, scratch, shape)
        cut, last = search_last_kept(
            row, scale, _top_k_of(distribution, distributions, shape),
            tl.load(distributions.top_p + distribution), low, sort_keys(top, shape.SHIFT),
            scratch.left_masses + 2 * distribution, found, shape,
        )  # fmt: skip
        write_samples(
            distribution, row, scale, cut, last, True, cut, cut * 0,
            tl.load(maximum_ptr + at), tl.load(max_logprob_ptr + at),
            keys, found, outputs, shape, DRAWS,
        )  # fmt: skip
