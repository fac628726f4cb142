"""Log-probabilities, ranks and alternatives of samples, before or after the logits processors.

K samples draw from R rows of logits; L = most alternatives; V = vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.step import Int64, LogprobsMode, SamplingBatch
from batchinfer.worker.sampling.groups import is_filtered
from batchinfer.worker.sampling.logits_processors import edit_logits
from batchinfer.worker.sampling.logprobs import Reported, look_up
from batchinfer.worker.sampling.output import Draws
from batchinfer.worker.sampling.top_k_top_p import integer_weights, left_out
from batchinfer.worker.transfer import to_device


def report(logits: Tensor, batch: SamplingBatch, draws: Draws, chunk: int) -> Reported | None:
    """Return log-probabilities of all samples, or the values that their ``LogprobsMode`` selects.

    Args:
        logits: [R, V] logits from which the samples were drawn.
        chunk: number of rows to process at a time.

    Returns:
        None if no sample requests log-probabilities. Samples without a token have 0.
    """
    wanted, modes = batch.num_logprobs, batch.logprobs_modes
    if wanted.max() < 0:
        return None
    rows, named, num_top = batch.logits_rows, batch.named_token_ids, _num_top(batch, logits)
    raw = look_up(logits, rows, draws.token_ids, wanted, named, num_top=num_top, chunk=chunk)
    row_of = to_device({"rows": rows.astype(np.int64)}, logits.device)["rows"]
    reported = raw._replace(values=draws.stats.logprobs(row_of, raw.values))
    reported.values[:, 0] = draws.logprobs
    if modes is None:
        return reported
    as_logits = to_device({"at": (modes & LogprobsMode.LOGITS) != 0}, logits.device)["at"]
    reported = raw._replace(values=torch.where(as_logits[:, None], raw.values, reported.values))
    processed = np.flatnonzero(((modes & LogprobsMode.PROCESSED) != 0) & (wanted >= 0))
    for low in range(0, len(processed), chunk):
        samples = processed[low : low + chunk]
        at = to_device({"at": samples}, logits.device)["at"]
        after_processors = _report_processed(
            logits, batch, samples, draws.token_ids[at], as_logits[at]
        )
        for ours, theirs in zip(reported, after_processors, strict=True):
            ours[at] = theirs
    reported.values[:, 0].masked_fill_(draws.failures != 0, 0)
    return reported


def _num_top(batch: SamplingBatch, logits: Tensor) -> int:
    return min(int(batch.num_logprobs.max()), logits.shape[1])


def _report_processed(
    logits: Tensor, batch: SamplingBatch, samples: Int64, token_ids: Tensor, as_logits: Tensor
) -> Reported:
    """Report ``samples`` [k], which drew ``token_ids`` [k], after all processors."""
    edited = _processed_logits(logits, batch, samples)
    named = None if batch.named_token_ids is None else batch.named_token_ids[samples]
    raw = look_up(
        edited,
        np.arange(len(samples), dtype=np.int32),
        token_ids,
        batch.num_logprobs[samples],
        named,
        num_top=_num_top(batch, logits),
        chunk=len(samples),
    )
    logprobs = raw.values - edited.logsumexp(1, keepdim=True)
    return raw._replace(values=torch.where(as_logits[:, None], raw.values, logprobs))


def _processed_logits(logits: Tensor, batch: SamplingBatch, samples: Int64) -> Tensor:
    """Return the logits from which samples are drawn: edited, divided by the temperature, filtered.

    For samples with temperature 0, they are only edited.

    Args:
        logits: [R, V]; not changed.
        samples: [k] indices of samples in the batch.

    Returns:
        float32 [k, V], -inf for excluded tokens.
    """
    rows = to_device({"rows": batch.logits_rows[samples].astype(np.int64)}, logits.device)["rows"]
    processed = logits.index_select(0, rows).float()
    edit_logits(processed, batch, samples)
    drawn = np.flatnonzero(batch.temperature[samples] > 0)
    if len(drawn) == 0:
        return processed
    which = samples[drawn]
    on = to_device(
        {
            "at": drawn,
            "temperature": batch.temperature[which, None],
            "min_p": batch.min_p[which, None],
        },
        logits.device,
    )
    edited = processed[on["at"]]
    scaled = edited / on["temperature"]
    relative = (scaled - scaled.amax(1, keepdim=True)).exp_()
    removed = relative < on["min_p"]
    if is_filtered(batch, logits.shape[1])[which].any():
        weights = integer_weights(relative.masked_fill_(removed, 0))
        removed |= left_out(weights, edited, batch.top_k[which], batch.top_p[which])
    processed[on["at"]] = scaled.masked_fill_(removed, -torch.inf)
    return processed
