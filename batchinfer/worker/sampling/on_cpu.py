"""Draws samples on a CPU, in C if the C code supports the logits' dtype, else with torch.

A sample's random number depends only on its key and counter. Philox-4x32-10 (Salmon, Moraes, Dror
and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) computes four random words from a
counter of four 32-bit words and a key of two words.

D = number of distinct distributions among the K samples; V = vocabulary size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.step import Int32, Int64, SamplingBatch, UInt64
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.kernels.cpu import sampling as native_sampling
from batchinfer.worker.sampling.groups import SampleGroup, group_samples, is_filtered
from batchinfer.worker.sampling.logits_processors import edit_logits, edited_samples, forbid_masked
from batchinfer.worker.sampling.logprobs import row_stats
from batchinfer.worker.sampling.output import NO_TOKEN_LEFT, NONFINITE, Draws
from batchinfer.worker.sampling.top_k_top_p import integer_weights, left_out

RANDOM_BITS = 24
"""Number of random bits per draw: as many as a float32 in [0, 1) can hold exactly."""

_ROUNDS = 10
_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)


def draw_on_cpu(logits: Tensor, batch: SamplingBatch, chunk: int) -> Draws:
    """Draw every sample.

    Args:
        logits: [R, V]; tokens that masks forbid become -inf.
        batch: parameters of the K samples.
        chunk: number of distributions to process at a time if logits must be copied.
    """
    forbid_masked(logits, batch.masked_rows, batch.masks)
    stats, argmax = row_stats(logits, chunk)
    rows = torch.from_numpy(batch.logits_rows.astype(np.int64))
    token_ids, failures = argmax[rows], _failures(stats.maximum, NONFINITE)[rows]

    edited, greedy = edited_samples(batch), batch.temperature == 0
    bits = np.zeros(len(rows), np.int64) if greedy.all() else _random_bits(batch)
    in_place = ~greedy & ~edited & cpu_attention.supports(logits.dtype)
    for group in group_samples(batch, edited, in_place, len(rows)):
        heads = batch.logits_rows[group.heads]
        drawn = _draw_natively(logits, stats.maximum, heads, batch, group, bits)
        token_ids[torch.from_numpy(group.samples)] = drawn
    filtered, in_workspace = is_filtered(batch, logits.shape[1]), ~greedy & ~in_place
    for chosen in (greedy & edited, in_workspace & ~filtered, in_workspace & filtered):
        for group in group_samples(batch, edited, chosen, chunk):
            samples = torch.from_numpy(group.samples)
            token_ids[samples], after_edits = _draw_in_workspace(logits, batch, group, bits)
            before = failures[samples]
            failures[samples] = torch.where(before == 0, after_edits, before)

    finite = failures == 0
    token_ids.masked_fill_(~finite, 0)
    if batch.given_token_ids is not None:
        given_ids = torch.from_numpy(batch.given_token_ids.astype(np.int64))
        token_ids = torch.where((given_ids >= 0) & finite, given_ids, token_ids)
    values = logits[rows, token_ids].float()
    logprobs = stats.logprobs(rows, values[:, None])[:, 0].masked_fill_(~finite, 0)
    return Draws(token_ids, logprobs, failures, stats)


def _draw_in_workspace(
    logits: Tensor, batch: SamplingBatch, group: SampleGroup, bits: Int64
) -> tuple[Tensor, Tensor]:
    """Draw a group from copies of its rows. Either all or none of the group's samples have
    temperature 0.

    Returns:
        Token ids [k], and codes [k] for why a sample has no token (0: the sample has a token).
    """
    edited = logits[torch.from_numpy(batch.logits_rows[group.heads])].float()
    edit_logits(edited, batch, group.heads)
    maximum, distributions = edited.amax(1), torch.from_numpy(group.distributions)
    if batch.temperature[group.heads[0]] == 0:
        chosen = edited.argmax(1)[distributions]
    elif cpu_attention.supports(edited.dtype):
        each = np.arange(len(edited), dtype=np.int32)
        chosen = _draw_natively(edited, maximum, each, batch, group, bits)
    else:
        weights = _weights(edited, maximum[:, None], batch, group.heads)
        chosen = _draw(weights, distributions, group, bits)
    return chosen, _failures(maximum, NO_TOKEN_LEFT)[distributions]


def _failures(maximum: Tensor, of_nothing: int) -> Tensor:
    """Return the code [R] for why no token of a row can be drawn; 0: a token can be drawn.

    Args:
        maximum: [R] largest logit of each row.
        of_nothing: code for rows whose logits are all -inf.
    """
    failing = torch.where(maximum.isneginf(), of_nothing, NONFINITE)
    return failing.masked_fill_(maximum.isfinite(), 0)


def _random_bits(batch: SamplingBatch) -> Int64:
    """Return uniformly distributed integers [K] in [0, 2**RANDOM_BITS). C and NumPy give the same
    integers."""
    keys = batch.seed, batch.stream, batch.sample_index, batch.position
    if not cpu_attention.supports(torch.float32):
        return random_bits(*keys)
    bits = np.empty(len(batch.seed), np.int64)
    tensors = [
        torch.from_numpy(np.ascontiguousarray(words.view(f"i{words.itemsize}"))) for words in keys
    ]
    native_sampling.random_bits(*tensors, out=torch.from_numpy(bits))
    return bits


def _draw_natively(
    logits: Tensor,  # [R, V]
    maximum: Tensor,  # [R]
    rows: Int32,  # [D] row of each distribution
    batch: SamplingBatch,
    group: SampleGroup,
    bits: Int64,  # [K] uniform in [0, 2**RANDOM_BITS)
) -> Tensor:
    """Draw token ids [k] in C, one row at a time.

    The torch functions ``_weights`` and ``_draw`` compute the same in ten times as much time.
    torch's ``exp`` may differ in the last bit, so about one token in a few million differs.
    """
    chosen = torch.zeros(len(group.samples), dtype=torch.int64)
    arrays = {name: getattr(batch, name)[group.heads] for name in batch.DISTRIBUTION}
    arrays |= {"rows": rows.astype(np.int64), "starts": group.starts, "bits": bits[group.samples]}
    on = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    native_sampling.draw(logits, maximum, **on, out=chosen)
    return chosen


def _weights(logits: Tensor, maximum: Tensor, batch: SamplingBatch, heads: Int64) -> Tensor:
    """Return integers, int64 [D, V], that are proportional to the probabilities after temperature
    and filters.

    Args:
        logits: [D, V].
        maximum: [D, 1] largest logit of each row.
        heads: [D] first sample of each distribution.
    """
    min_p = batch.min_p[heads]
    shifted = logits - maximum
    # If a row's maximum is not finite, a token is drawn as if all were equally likely, and dropped
    # later.
    shifted.masked_fill_(~maximum.isfinite(), 0)
    relative = shifted.div_(torch.from_numpy(batch.temperature[heads, None])).exp_()
    if min_p.any():
        relative.masked_fill_(relative < torch.from_numpy(min_p[:, None]), 0)
    weights = integer_weights(relative)
    if is_filtered(batch, logits.shape[1])[heads].any():
        removed = left_out(weights, logits, batch.top_k[heads], batch.top_p[heads])
        weights.masked_fill_(removed, 0)
    return weights


def _draw(weights: Tensor, distributions: Tensor, group: SampleGroup, bits: Int64) -> Tensor:
    """Return each sample's token: the first token in id order whose cumulative weight exceeds u
    times the total weight. Weights are integers, so the arithmetic is exact, and a token of weight
    0 is never drawn.

    Args:
        distributions: [k] row of ``weights`` for each sample.
        bits: [K] the samples' random numbers u, in units of 2**-RANDOM_BITS.
    """
    uniform = torch.from_numpy(bits[group.samples])
    place = torch.arange(len(uniform)) - torch.from_numpy(group.starts)[distributions]
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1][distributions]
    # Compute floor(total * bits / 2**RANDOM_BITS) in two parts, because the product does not fit in
    # 63 bits.
    low = (total & (2**RANDOM_BITS - 1)) * uniform >> RANDOM_BITS
    targets = cumulative.new_zeros(len(weights), int(place.max()) + 1)
    targets[distributions, place] = (total >> RANDOM_BITS) * uniform + low
    return torch.searchsorted(cumulative, targets, right=True)[distributions, place]


def philox_4x32(counter: UInt64, key: UInt64) -> UInt64:
    """Return random words [4, K] for counters [4, K] and keys [2, K]. Each 32-bit word is stored in
    64 bits."""
    left, right = counter[[0, 2]], counter[[1, 3]]
    for _ in range(_ROUNDS):
        product = (left * _MULTIPLIERS)[::-1]
        left, right = (product >> _WORD_BITS) ^ right ^ key, product & _WORD
        key = (key + _KEY_STEPS) & _WORD
    return np.stack((left[0], right[0], left[1], right[1]))


def random_bits(seed: UInt64, stream: UInt64, sample_index: Int32, position: Int32) -> Int64:
    """Return integers [K], uniformly distributed in [0, 2**RANDOM_BITS), for K tokens to be drawn.

    The key is the seed. The counter is (low word of the stream, high word, sample index, position).

    Args:
        stream: [K] the row's random stream.
        position: [K] number of output tokens before this token.
    """
    places = sample_index.astype(np.uint64), position.astype(np.uint64)
    counter = np.stack((stream & _WORD, stream >> _WORD_BITS, *places))
    key = np.stack((seed & _WORD, seed >> _WORD_BITS))
    bits: UInt64 = philox_4x32(counter, key)[0] >> np.uint64(32 - RANDOM_BITS)
    return bits.astype(np.int64)
