"""Log-probabilities from the model's unmodified logits.

R = rows of logits, K = samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.step import Int32
from batchinfer.kernels.cpu import native
from batchinfer.worker.sampling.top_k_top_p import most_likely
from batchinfer.worker.transfer import to_device


@dataclass(frozen=True, slots=True)
class RowStats:
    """Statistics of rows of logits, from one pass over them."""

    maximum: Tensor  # float32 [R]; NaN or infinite where the row is not usable
    max_logprob: Tensor  # float32 [R] log-probability of the most likely token
    argmax: Tensor | None  # int64 [R] lowest id of the most likely tokens, if asked for

    def logprobs(self, rows: Tensor, logits: Tensor) -> Tensor:
        """Log-probabilities of ``logits``, float32 [K] or [K, L], taken from ``rows`` [K]."""
        shape = (-1,) + (1,) * (logits.ndim - 1)
        return (logits - self.maximum[rows].view(shape)) + self.max_logprob[rows].view(shape)


def row_stats(logits: Tensor, chunk: int, *, want_argmax: bool) -> RowStats:
    """Statistics of the rows of ``logits`` [R, V]; on a CPU ``chunk`` rows at a time."""
    if logits.is_cuda or native.supports(logits.dtype):
        return _row_stats_by_kernel(logits)
    starts = range(0, len(logits), chunk)
    chunks = [_chunk_stats(logits[low : low + chunk].float(), want_argmax) for low in starts]
    return RowStats(
        maximum=torch.cat([stats.maximum for stats in chunks]),
        max_logprob=torch.cat([stats.max_logprob for stats in chunks]),
        argmax=torch.cat([stats.argmax for stats in chunks if stats.argmax is not None])
        if want_argmax
        else None,
    )


def _chunk_stats(logits: Tensor, want_argmax: bool) -> RowStats:
    if native.supports(logits.dtype):
        return _row_stats_by_kernel(logits)
    return RowStats(
        maximum=logits.amax(1),
        max_logprob=logits.log_softmax(1).amax(1),
        argmax=logits.argmax(1) if want_argmax else None,
    )


def _row_stats_by_kernel(logits: Tensor) -> RowStats:
    if logits.is_cuda:
        from batchinfer.kernels.row_stats import row_stats as kernel
    else:
        from batchinfer.kernels.cpu.row_ops import row_stats as kernel

    # Each where an allocation begins: Triton compiles anew for an address that is not aligned.
    maximum, max_logprob = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    argmax = logits.new_empty(len(logits), dtype=torch.int64)
    kernel(logits, maximum=maximum, max_logprob=max_logprob, argmax=argmax)
    return RowStats(maximum, max_logprob, argmax)


def token_ranks(logits: Tensor, rows: Int32, values: Tensor, wanted: Int32, chunk: int) -> Tensor:
    """Ranks of the chosen tokens, 1 = most likely; 0 for samples without logprobs.

    Args:
        logits: [R, V].
        rows: [K] row of logits of each sample.
        values: float32 [K] logits of the chosen tokens.
        wanted: [K] -1 = no logprobs.
        chunk: rows to work on at a time.

    Returns:
        int64 [K].
    """
    result = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    asking = np.flatnonzero(wanted >= 0)
    for low in range(0, len(asking), chunk):
        samples = asking[low : low + chunk]
        on = to_device({"samples": samples, "rows": rows[samples]}, logits.device)
        chosen = values[on["samples"]][:, None]
        result[on["samples"]] = 1 + (logits[on["rows"]].float() > chosen).sum(1)
    return result


def named_logits(logits: Tensor, rows: Tensor, token_ids: Int32) -> Tensor:
    """Logits of given tokens, float32 [K, W]; -inf in place of padding.

    Args:
        logits: [R, V].
        rows: int64 [K] row of logits of each sample.
        token_ids: [K, W] below V, padded with -1.
    """
    # On a GPU an index out of range takes the whole process with it.
    assert token_ids.max(initial=-1) < logits.shape[1], "token id not in the model"
    ids = to_device({"ids": token_ids.astype(np.int64)}, logits.device)["ids"]
    values = logits[rows[:, None], ids.clamp(min=0)].float()
    return values.masked_fill_(ids < 0, -torch.inf)


def top_logits(logits: Tensor, rows: Int32, wanted: Int32, chunk: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens of each sample's row, best first, lower ids first among equals.

    Returns:
        Token ids, int64 [K, L], and their logits, float32 [K, L], with L the most that any
        sample wants; samples that want none have zeros and -inf.
    """
    most = min(int(wanted.max()), logits.shape[1])
    shape = (len(rows), most)
    ids = torch.zeros(shape, dtype=torch.int64, device=logits.device)
    values = torch.full(shape, -torch.inf, device=logits.device)
    asking = np.flatnonzero(wanted > 0)
    distinct, row_of = np.unique(rows[asking], return_inverse=True)
    for low in range(0, len(distinct), chunk):
        in_chunk = (row_of >= low) & (row_of < low + chunk)
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "samples": asking[in_chunk],
            "row_of": row_of[in_chunk] - low,
            "rows": distinct[low : low + chunk],
        }
        on = to_device(arrays, logits.device)
        raw = logits[on["rows"]].float()
        best = most_likely(raw, most)
        ids[on["samples"]] = best[on["row_of"]]
        values[on["samples"]] = raw.gather(1, best)[on["row_of"]]
    return ids, values
