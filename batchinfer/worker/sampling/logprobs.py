"""Logits and log-probabilities of the tokens that a result reports.

R = rows of logits, K = samples, V = vocabulary size, L = largest number of alternatives per sample,
W = largest number of named ids per sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.step import Int32
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.worker.sampling.token_ids import check_token_ids
from batchinfer.worker.sampling.top_k_top_p import most_likely
from batchinfer.worker.transfer import to_device


class RowStats(NamedTuple):
    maximum: Tensor  # float32 [R]; NaN or infinite if the row is not usable
    max_logprob: Tensor  # float32 [R] log-probability of the most likely token

    def logprobs(self, rows: Tensor, logits: Tensor) -> Tensor:
        """Return the log-probabilities of ``logits`` [K, ...], which come from ``rows`` [K]."""
        return (logits - self.maximum[rows][:, None]) + self.max_logprob[rows][:, None]


def row_stats(logits: Tensor, chunk: int) -> tuple[RowStats, Tensor]:
    """Return statistics of the rows of ``logits`` [R, V], and the id of each row's most likely
    token, int64 [R] (the lowest id if tokens are equally likely). If the logits must be converted
    to float32, ``chunk`` rows are processed at a time."""
    if logits.is_cuda or cpu_attention.supports(logits.dtype):
        return _row_stats_by_kernel(logits)
    compute = _row_stats_by_kernel if cpu_attention.supports(torch.float32) else _row_stats_by_torch
    chunks = torch.split(logits, chunk)
    stats, argmax = zip(*(compute(rows.float()) for rows in chunks), strict=True)
    return RowStats(*map(torch.cat, zip(*stats, strict=True))), torch.cat(argmax)


def _row_stats_by_torch(logits: Tensor) -> tuple[RowStats, Tensor]:
    return RowStats(logits.amax(1), logits.log_softmax(1).amax(1)), logits.argmax(1)


def _row_stats_by_kernel(logits: Tensor) -> tuple[RowStats, Tensor]:
    if logits.is_cuda:
        from batchinfer.kernels.row_stats import row_stats as kernel
    else:
        from batchinfer.kernels.cpu.row_ops import row_stats as kernel

    stats, argmax = empty_stats(logits), logits.new_empty(len(logits), dtype=torch.int64)
    kernel(logits, maximum=stats.maximum, max_logprob=stats.max_logprob, argmax=argmax)
    return stats, argmax


def empty_stats(logits: Tensor) -> RowStats:
    """Return uninitialized statistics for a kernel. Each tensor is a separate allocation, because
    Triton would compile another variant of the kernel for an unaligned address.
    """
    return RowStats(*(logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2)))


class Reported(NamedTuple):
    """Logits or log-probabilities to report for K samples, on the samples' device."""

    # Float32 [K, 1 + L + W] values of the drawn token, the most likely tokens and the named tokens.
    values: Tensor
    ranks: Tensor  # int64 [K] 1 = most likely; 0 for samples without log-probabilities
    top_token_ids: Tensor  # int64 [K, L] best first


def look_up(
    logits: Tensor,
    rows: Int32,
    token_ids: Tensor,
    wanted: Int32,
    named_token_ids: Int32 | None,
    *,
    num_top: int,
    chunk: int,
) -> Reported:
    """Look up the logits to report for K samples.

    Args:
        logits: [R, V].
        rows: [K] row of each sample.
        token_ids: int64 [K] on the device.
        wanted: [K] number of most likely tokens to report; -1: report nothing, not even a rank.
        named_token_ids: [K, W] ids below V, padded with -1; the value of padding is -inf.
        num_top: L, at most V.
        chunk: number of rows to process at a time.
    """
    on = to_device({"rows": rows.astype(np.int64)}, logits.device)["rows"]
    drawn = logits[on, token_ids].float()
    top_token_ids, top = _top_logits(logits, rows, wanted, num_top, chunk)
    columns = [drawn[:, None], top]
    if named_token_ids is not None:
        columns.append(_named_logits(logits, on, named_token_ids))
    ranks = _token_ranks(logits, rows, drawn, wanted, chunk)
    return Reported(torch.cat(columns, dim=1), ranks, top_token_ids)


def _token_ranks(logits: Tensor, rows: Int32, values: Tensor, wanted: Int32, chunk: int) -> Tensor:
    """Return ranks int64 [K] of tokens with the logits ``values`` [K]; 0 where ``wanted`` is
    negative."""
    result = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    asking = np.flatnonzero(wanted >= 0)
    for low in range(0, len(asking), chunk):
        samples = asking[low : low + chunk]
        on = to_device({"samples": samples, "rows": rows[samples]}, logits.device)
        chosen = values[on["samples"]][:, None]
        result[on["samples"]] = 1 + (logits[on["rows"]].float() > chosen).sum(1)
    return result


def _named_logits(logits: Tensor, rows: Tensor, token_ids: Int32) -> Tensor:
    check_token_ids(token_ids, logits.shape[1], least=-1)
    ids = to_device({"ids": token_ids.astype(np.int64)}, logits.device)["ids"]
    values = logits[rows[:, None], ids.clamp(min=0)].float()
    return values.masked_fill_(ids < 0, -torch.inf)


def _top_logits(
    logits: Tensor, rows: Int32, wanted: Int32, num_top: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens [K, L] of each sample's row, best first, and the tokens'
    logits. Equally likely tokens are ordered by id. Samples without log-probabilities get ids 0 and
    logits -inf."""
    ids = torch.zeros((len(rows), num_top), dtype=torch.int64, device=logits.device)
    values = torch.full(ids.shape, -torch.inf, device=logits.device)
    asking = np.flatnonzero(wanted > 0)
    distinct, row_of = np.unique(rows[asking], return_inverse=True)
    for low in range(0, len(distinct), chunk):
        in_chunk = (row_of >= low) & (row_of < low + chunk)
        on = to_device(
            {
                "samples": asking[in_chunk],
                "row_of": row_of[in_chunk] - low,
                "rows": distinct[low : low + chunk],
            },
            logits.device,
        )
        raw = logits[on["rows"]].float()
        best = most_likely(raw, num_top)
        ids[on["samples"]] = best[on["row_of"]]
        values[on["samples"]] = raw.gather(1, best)[on["row_of"]]
    return ids, values
