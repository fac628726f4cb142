"""What is told of samples beside their tokens: log-probabilities, ranks, alternatives.

K samples of R rows of logits; L = most alternatives, W = most ids that any sample names;
V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.step import Int32, Int64, LogprobsMode, SamplingBatch
from batchinfer.worker.sampling.logits_processors import edit_logits
from batchinfer.worker.sampling.logprobs import named_logits, token_ranks, top_logits
from batchinfer.worker.sampling.output import Draws
from batchinfer.worker.sampling.top_k_top_p import integer_weights, left_out
from batchinfer.worker.transfer import to_device


@dataclass(frozen=True, slots=True)
class Reported:
    """Logits or log-probabilities that K samples are given with, on their device."""

    tokens: Tensor  # float32 [K] of the tokens drawn
    ranks: Tensor  # int64 [K] 1 = most likely; 0 for samples that ask for no log-probabilities
    top_token_ids: Tensor  # int64 [K, L] best first
    top: Tensor  # float32 [K, L]
    named: Tensor | None = None  # float32 [K, W] of the ids that samples name

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Reported:
        """The same with ``change`` of each value; it takes [K] and [K, any]."""
        named = None if self.named is None else change(self.named)
        return replace(self, tokens=change(self.tokens), top=change(self.top), named=named)

    def or_if(self, chosen: Tensor, other: Reported) -> Reported:
        """The values of ``other`` for the samples ``chosen``, bool [K]."""
        named = None
        if self.named is not None and other.named is not None:
            named = torch.where(chosen[:, None], other.named, self.named)
        return replace(
            self,
            tokens=torch.where(chosen, other.tokens, self.tokens),
            top=torch.where(chosen[:, None], other.top, self.top),
            named=named,
        )

    @classmethod
    def joined(cls, parts: Sequence[Reported]) -> Reported:
        """Those of several groups of samples, which have L and W in common."""
        named = [part.named for part in parts if part.named is not None]
        return cls(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.ranks for part in parts]),
            torch.cat([part.top_token_ids for part in parts]),
            torch.cat([part.top for part in parts]),
            torch.cat(named) if named else None,
        )

    def put(self, samples: Tensor, others: Reported) -> None:
        """Write what ``others`` say to ``samples`` [k]; their L may be less."""
        width = others.top.shape[1]
        self.tokens[samples] = others.tokens
        self.ranks[samples] = others.ranks
        self.top_token_ids[samples, :width] = others.top_token_ids
        self.top[samples, :width] = others.top
        if self.named is not None and others.named is not None:
            self.named[samples] = others.named


def report(logits: Tensor, batch: SamplingBatch, draws: Draws, chunk: int) -> Reported | None:
    """Log-probabilities of all samples, or what their ``LogprobsMode`` says in place of these.

    Args:
        logits: [R, V] that the samples were drawn from.
        chunk: rows to work on at a time.

    Returns:
        None where no sample asks for any; the token's is 0 where none could be drawn.
    """
    wanted, modes = batch.num_logprobs, batch.logprobs_modes
    if wanted.max() < 0:
        return None
    rows = to_device({"rows": batch.logits_rows.astype(np.int64)}, logits.device)["rows"]
    raw = look_up(logits, batch.logits_rows, draws.token_ids, wanted, batch.named_token_ids, chunk)
    found = raw.mapped(lambda values: draws.stats.logprobs(rows, values))
    if modes is None:
        return replace(found, tokens=draws.logprobs)
    as_logits = to_device({"at": (modes & LogprobsMode.LOGITS) != 0}, logits.device)["at"]
    found = found.or_if(as_logits, raw)
    processed = np.flatnonzero(((modes & LogprobsMode.PROCESSED) != 0) & (wanted >= 0))
    for low in range(0, len(processed), chunk):
        samples = processed[low : low + chunk]
        at = to_device({"at": samples}, logits.device)["at"]
        others = _report_processed(logits, batch, samples, draws.token_ids[at], as_logits[at])
        found.put(at, others)
    return replace(found, tokens=found.tokens.masked_fill(draws.failures != 0, 0))


def _report_processed(
    logits: Tensor, batch: SamplingBatch, samples: Int64, token_ids: Tensor, as_logits: Tensor
) -> Reported:
    """What is told of ``samples`` [k], which drew ``token_ids`` [k], after all processors."""
    own = processed_logits(logits, batch, samples)
    each, named = np.arange(len(samples), dtype=np.int32), batch.named_token_ids
    found = look_up(
        own,
        each,
        token_ids,
        batch.num_logprobs[samples],
        None if named is None else named[samples],
        len(samples),
    )
    total = own.logsumexp(1)

    def logprobs(values: Tensor) -> Tensor:
        return values - (total if values.ndim == 1 else total[:, None])

    return found.mapped(logprobs).or_if(as_logits, found)


def processed_logits(logits: Tensor, batch: SamplingBatch, samples: Int64) -> Tensor:
    """Logits as samples are drawn from them: edited, over their temperature, filtered.

    Those of samples that take the most likely token have no temperature and no filters.

    Args:
        logits: [R, V]; left as they are.
        samples: [k] of the batch's.

    Returns:
        float32 [k, V], -inf where a token is left out.
    """
    rows = to_device({"rows": batch.logits_rows[samples].astype(np.int64)}, logits.device)["rows"]
    own = logits.index_select(0, rows).float()
    edit_logits(own, batch, samples)
    drawn = np.flatnonzero(batch.temperature[samples] > 0)
    if len(drawn) == 0:
        return own
    which, vocab = samples[drawn], logits.shape[1]
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "at": drawn,
        "temperature": batch.temperature[which, None],
        "min_p": batch.min_p[which, None],
    }
    on = to_device(arrays, logits.device)
    edited = own[on["at"]]
    scaled = edited / on["temperature"]
    relative = (scaled - scaled.amax(1, keepdim=True)).exp_()
    removed = relative < on["min_p"]
    if ((batch.top_k[which] > 0) & (batch.top_k[which] < vocab) | (batch.top_p[which] < 1)).any():
        weights = integer_weights(relative.masked_fill_(removed, 0))
        removed |= left_out(weights, edited, batch.top_k[which], batch.top_p[which])
    own[on["at"]] = scaled.masked_fill_(removed, -torch.inf)
    return own


def look_up(
    logits: Tensor,
    rows: Int32,
    token_ids: Tensor,
    wanted: Int32,
    named_token_ids: Int32 | None,
    chunk: int,
) -> Reported:
    """Logits that K samples are given with: of their tokens, the most likely ones, named ones.

    Args:
        logits: [R, V].
        rows: [K] row of each sample.
        token_ids: int64 [K] on the device.
        wanted: [K] most likely ones; -1: not even the rank of the token.
        named_token_ids: [K, W] padded with -1.
        chunk: rows to work on at a time.
    """
    on = to_device({"rows": rows.astype(np.int64)}, logits.device)["rows"]
    values = logits[on, token_ids].float()
    named = None if named_token_ids is None else named_logits(logits, on, named_token_ids)
    return Reported(
        values,
        token_ranks(logits, rows, values, wanted, chunk),
        *top_logits(logits, rows, wanted, chunk),
        named,
    )
