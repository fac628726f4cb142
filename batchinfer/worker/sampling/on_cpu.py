"""Samples on a CPU: in C where it can be compiled for the logits' type, else by torch.

D = distinct distributions among the K samples; V = vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.step import Bool, Int32, Int64, SamplingBatch
from batchinfer.kernels.cpu import native
from batchinfer.kernels.cpu import sampling as native_sampling
from batchinfer.worker.sampling.groups import SampleGroup, group_samples
from batchinfer.worker.sampling.logits_processors import edit_logits, edited_samples, forbid_masked
from batchinfer.worker.sampling.logprobs import RowStats, row_stats
from batchinfer.worker.sampling.output import NO_TOKEN_LEFT, NONFINITE, Draws
from batchinfer.worker.sampling.philox import RANDOM_BITS, random_bits
from batchinfer.worker.sampling.top_k_top_p import integer_weights, keep_most_likely
from batchinfer.worker.transfer import to_device


def draw_on_cpu(logits: Tensor, batch: SamplingBatch, chunk: int) -> Draws:
    """Draw every sample.

    Args:
        logits: [R, V]; what masks forbid becomes -inf.
        batch: how to draw K samples.
        chunk: distributions to work on at a time, where they take a workspace.
    """
    if len(batch.masked_rows):
        forbid_masked(logits, batch.masked_rows, batch.masks, chunk)
    edited = edited_samples(batch)
    plain = (batch.temperature == 0) & ~edited
    stats = row_stats(logits, chunk, want_argmax=bool(plain.any()))
    rows = torch.from_numpy(batch.logits_rows.astype(np.int64))
    token_ids, failures = _choose_all(logits, batch, edited, stats, rows, chunk)
    finite = failures == 0
    if batch.given_token_ids is not None:
        given = torch.from_numpy(batch.given_token_ids.astype(np.int64))
        token_ids = torch.where((given >= 0) & finite, given, token_ids)
    values = logits[rows, token_ids].float()
    logprobs = stats.logprobs(rows, values).masked_fill_(~finite, 0)
    return Draws(token_ids, logprobs, failures, stats)


def _choose_all(
    logits: Tensor, batch: SamplingBatch, edited: Bool, stats: RowStats, rows: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Token ids [K], and why none could be drawn [K]: 0, ``NONFINITE`` or ``NO_TOKEN_LEFT``."""
    failures = _failures(stats.maximum, NONFINITE)[rows]
    token_ids = torch.zeros_like(rows) if stats.argmax is None else stats.argmax[rows]
    bits = np.zeros(len(rows), np.int64)
    if (batch.temperature > 0).any():
        bits = _random_bits(batch, natively=_draws_natively(logits.device, torch.float32))
    in_place = _draws_natively(logits.device, logits.dtype)
    for group in group_samples(batch, edited, logits.shape[1], chunk, in_place=in_place):
        arrays = {"samples": group.samples, "distributions": group.distributions}
        on = to_device(arrays, logits.device)
        heads = batch.logits_rows[group.heads]
        if group.in_place:
            chosen = _draw_natively(logits, stats.maximum, heads, batch, group, bits[group.samples])
            token_ids[on["samples"]] = chosen
            continue
        own = _rows_of(logits, heads)
        if edited[group.heads].any():
            own = own.clone()
            edit_logits(own, batch, group.heads)
        maximum = own.amax(1)
        if group.greedy:
            chosen = own.argmax(1)[on["distributions"]]
        elif _draws_natively(own.device, own.dtype):
            each = np.arange(len(own), dtype=np.int32)
            chosen = _draw_natively(own, maximum, each, batch, group, bits[group.samples])
        else:
            weights = _weights(own, maximum[:, None], batch, group)
            chosen = _draw(weights, group, bits[group.samples])
        token_ids[on["samples"]] = chosen
        before = failures[on["samples"]]
        after_edits = _failures(maximum, NO_TOKEN_LEFT)[on["distributions"]]
        failures[on["samples"]] = torch.where(before == 0, after_edits, before)
    return token_ids.masked_fill_(failures != 0, 0), failures


def _failures(maximum: Tensor, of_nothing: int) -> Tensor:
    """Why nothing can be drawn from rows with these largest logits: 0 = it can.

    Args:
        maximum: [R].
        of_nothing: the reason where all logits are -inf.
    """
    failing = torch.where(maximum.isneginf(), of_nothing, NONFINITE)
    return failing.masked_fill_(maximum.isfinite(), 0)


def _rows_of(logits: Tensor, rows: Int32) -> Tensor:
    """Rows of logits in float32; neighbours in a float32 tensor are not copied."""
    if (np.diff(rows) == 1).all():
        return logits[int(rows[0]) : int(rows[-1]) + 1].float()
    on = to_device({"rows": rows}, logits.device)
    return logits.index_select(0, on["rows"]).float()


def _draws_natively(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and native.supports(dtype)


def _random_bits(batch: SamplingBatch, *, natively: bool) -> Int64:
    """[K] uniform in [0, 2**RANDOM_BITS), equal whether drawn natively or not."""
    keys = batch.seed, batch.stream, batch.sample_index, batch.position
    if not natively:
        return random_bits(*keys)
    bits = np.empty(len(batch.seed), np.int64)
    tensors = [
        torch.from_numpy(np.ascontiguousarray(words.view(f"i{words.itemsize}"))) for words in keys
    ]
    native_sampling.random_bits(*tensors, out=torch.from_numpy(bits))
    return bits


def _draw_natively(
    logits: Tensor,
    maximum: Tensor,
    rows: Int32,
    batch: SamplingBatch,
    group: SampleGroup,
    bits: Int64,
) -> Tensor:
    """Token ids [k], drawn in C, one row at a time.

    They are those of ``_weights`` and ``_draw``, at a tenth of the time. ``exp`` differs in its
    last bit, which moves one token in some millions.

    Args:
        logits: [R, V].
        maximum: [R] of each row.
        rows: [D] which of the R each distribution is of.
        batch: all samples.
        group: those to draw.
        bits: [k] uniform in [0, 2**RANDOM_BITS).
    """
    chosen = torch.zeros(len(group.samples), dtype=torch.int64)
    arrays = {name: getattr(batch, name)[group.heads] for name in batch.DISTRIBUTION}
    starts = np.searchsorted(group.distributions, np.arange(len(group.heads) + 1))
    arrays |= {"rows": rows.astype(np.int64), "starts": starts.astype(np.int64), "bits": bits}
    native_sampling.draw(logits, maximum, **to_device(arrays, logits.device), out=chosen)
    return chosen


def _weights(logits: Tensor, maximum: Tensor, batch: SamplingBatch, group: SampleGroup) -> Tensor:
    """Probabilities as integers, int64 [D, V], at temperature and with the filters applied."""
    min_p = batch.min_p[group.heads]
    arrays = {"temperature": batch.temperature[group.heads, None], "min_p": min_p[:, None]}
    on = to_device(arrays, logits.device)
    shifted = logits - maximum
    # A row without a finite maximum is drawn from as if flat; its token is dropped later.
    shifted.masked_fill_(~maximum.isfinite(), 0)
    relative = shifted.div_(on["temperature"]).exp_()
    if min_p.any():
        relative.masked_fill_(relative < on["min_p"], 0)
    weights = integer_weights(relative)
    if group.filtered:
        keep_most_likely(weights, logits, batch.top_k[group.heads], batch.top_p[group.heads])
    return weights


def _draw(weights: Tensor, group: SampleGroup, bits: Int64) -> Tensor:
    """The first token, in id order, whose cumulative weight is over u times the total.

    Exact in integers, so a token of weight 0 is never drawn.

    Args:
        weights: int64 [D, V].
        group: the k samples.
        bits: [k] u in units of 2**-RANDOM_BITS.

    Returns:
        int64 [k].
    """
    order = np.arange(len(group.samples))
    place = order - np.searchsorted(group.distributions, group.distributions)  # in its distribution
    arrays = {"distributions": group.distributions, "place": place, "bits": bits}
    on = to_device(arrays, weights.device)
    at = on["distributions"], on["place"]
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1][on["distributions"]]
    # floor(total * bits / 2**RANDOM_BITS), in halves: the product does not fit in 63 bits.
    low = (total & (2**RANDOM_BITS - 1)) * on["bits"] >> RANDOM_BITS
    targets = cumulative.new_zeros(len(weights), int(place.max()) + 1)
    targets[at] = (total >> RANDOM_BITS) * on["bits"] + low
    return torch.searchsorted(cumulative, targets, right=True)[at]
