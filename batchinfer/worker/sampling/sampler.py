"""Draws a step's tokens from its logits.

Probabilities are integers in units of 2**-40 of the most likely token's probability, so sums over
the vocabulary are exact in any order. A row therefore gets the same token alone, in any batch and
in any chunk, with any number of samples. Rounding changes a probability by less than 1e-12 of the
most likely token's probability.

K samples draw from R rows of logits, with D distinct distributions. L = largest number of
alternatives that a sample reports; V = vocabulary size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.step import Int64, LogprobsMode, SamplingBatch
from batchinfer.kernels.cpu import sampling as native_sampling
from batchinfer.worker.sampling.groups import is_filtered
from batchinfer.worker.sampling.logits_processors import (
    edit_logits,
    edited_samples,
    run_processors,
)
from batchinfer.worker.sampling.logprobs import Reported, look_up
from batchinfer.worker.sampling.on_cpu import draw_on_cpu
from batchinfer.worker.sampling.on_device import draw_on_device
from batchinfer.worker.sampling.on_device import workspace_bytes as device_workspace_bytes
from batchinfer.worker.sampling.output import Draws, SampleHandle
from batchinfer.worker.sampling.top_k_top_p import integer_weights, left_out
from batchinfer.worker.transfer import to_device

_WORKSPACE_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
"""Largest number of logits that torch processes at a time, except that a single row may have more.
On a CPU, this many logits fit into a cache."""
_WORKSPACE_BYTES_EACH = 64
"""Bytes of workspace per logit. Measured: 24 for temperature, 28 for a small top-k, 51 for a top-k
of nearly the vocabulary, 54 for top-p on flat rows. The remaining bytes are for sorting
alternatives on a CUDA device."""


def workspace_bytes(rows: int, vocab: int, device_type: str) -> int:
    """Return an upper bound on the bytes that sampling needs in addition to ``rows`` rows of
    ``vocab`` logits."""
    elements = min(rows * vocab, max(vocab, _WORKSPACE_ELEMENTS[device_type]))
    by_torch = elements * _WORKSPACE_BYTES_EACH
    if device_type == "cpu":
        return by_torch + native_sampling.draw_bytes(vocab)
    # Alternatives are found after the draws, when the draws' workspace is free again.
    return max(by_torch, device_workspace_bytes(rows, vocab))


def workspace_rows(vocab: int, device_type: str) -> int:
    return max(1, _WORKSPACE_ELEMENTS[device_type] // vocab)


class Sampler:
    """Turns logits and sampling parameters into tokens. Holds no state.

    The order of operations is the same as in vLLM. Users' functions and the token masks of grammars
    come first. Log-probabilities are computed from the resulting logits, unless ``LogprobsMode``
    selects logits of a later stage. Bias and bans, allowed ids and penalties come next. At
    temperature 0, the most likely token is chosen. At a higher temperature, temperature, min-p,
    top-k and top-p are applied, and a uniform random number selects a token by cumulative
    probability in id order. The random number comes from Philox and depends on the seed, the
    stream, the sample index and the position.
    """

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SampleHandle:
        """Draw a token for every sample, and start copying the results to the host.

        A sample is marked nonfinite if its unedited row contains NaN or +inf, or only -inf. A
        sample whose bans and allowed ids exclude all tokens is marked nonfinite and as having no
        token left. In both cases, the sample's token and log-probability are 0, and other samples
        are not affected. If a sample's token is given, the result is that token and its
        log-probability. Equally likely tokens are ordered by id.

        Args:
            logits: [R, V] floating point, on any device; unchanged, except for rows that users'
                functions change, and tokens that masks forbid, which become -inf.
            batch: parameters of the K samples.

        Returns:
            The samples, whose copy to the host has started. If only some samples requested
            log-probabilities, the remaining samples have ``ranks`` 0, ``top_token_ids`` 0 and
            ``top_logprobs`` -inf. L is at most V.
        """
        if len(batch.logits_rows) == 0:
            return SampleHandle.nothing(logits.device)
        chunk = workspace_rows(logits.shape[1], logits.device.type)
        run_processors(logits, batch.processed)
        if logits.is_cuda:
            draws = draw_on_device(logits, batch)
        else:
            draws = draw_on_cpu(logits, batch, chunk)
        reported = report(logits, batch, draws, chunk)
        logprobs = draws.logprobs if reported is None else reported.values[:, 0]
        return SampleHandle(draws.token_ids, logprobs, draws.failures, reported)


def report(logits: Tensor, batch: SamplingBatch, draws: Draws, chunk: int) -> Reported | None:
    """Return all samples' log-probabilities, or the values that their ``LogprobsMode`` selects.

    Args:
        logits: [R, V] logits from which the samples were drawn.
        chunk: number of rows to process at a time.

    Returns:
        The values, or None if no sample requests log-probabilities. A sample without a token has
        the value 0.
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
    changed = {
        LogprobsMode.PROCESSED: (modes & LogprobsMode.PROCESSED) != 0,
        LogprobsMode.EDITED: ((modes & LogprobsMode.EDITED) != 0) & edited_samples(batch),
    }
    for mode, is_changed in changed.items():
        asking = np.flatnonzero(is_changed & (wanted >= 0))
        for low in range(0, len(asking), chunk):
            samples = asking[low : low + chunk]
            at = to_device({"at": samples}, logits.device)["at"]
            if mode is LogprobsMode.EDITED:
                after = _report_edited(logits, batch, samples, draws, at)
            else:
                after = _report_processed(logits, batch, samples, draws, at, as_logits[at])
            for ours, theirs in zip(reported, after, strict=True):
                ours[at] = theirs
    reported.values[:, 0].masked_fill_(draws.failures != 0, 0)
    return reported


def _num_top(batch: SamplingBatch, logits: Tensor) -> int:
    return min(int(batch.num_logprobs.max()), logits.shape[1])


def _report_processed(
    logits: Tensor,
    batch: SamplingBatch,
    samples: Int64,  # [k]
    draws: Draws,
    at: Tensor,  # ``samples`` on the device
    as_logits: Tensor,  # bool [k]
) -> Reported:
    processed = _processed_logits(logits, batch, samples)
    raw = _look_up_own(processed, batch, samples, draws.token_ids[at])
    logprobs = raw.values - processed.logsumexp(1, keepdim=True)
    return raw._replace(values=torch.where(as_logits[:, None], raw.values, logprobs))


def _report_edited(
    logits: Tensor, batch: SamplingBatch, samples: Int64, draws: Draws, at: Tensor
) -> Reported:
    """Report the values of ``samples`` [k] in ``LogprobsMode.EDITED``. ``at`` has ``samples`` on
    the device."""
    rows = to_device({"rows": batch.logits_rows[samples].astype(np.int64)}, logits.device)["rows"]
    logprobs = draws.stats.logprobs(rows, logits.index_select(0, rows).float())
    edit_logits(logprobs, batch, samples)
    return _look_up_own(logprobs, batch, samples, draws.token_ids[at])


def _look_up_own(
    values: Tensor, batch: SamplingBatch, samples: Int64, token_ids: Tensor
) -> Reported:
    """Look up what each of ``samples`` [k] reports in its own row of ``values``.

    Args:
        values: [k, V] logits or log-probabilities; row i belongs to ``samples[i]``.
        token_ids: int64 [k] drawn tokens.
    """
    return look_up(
        values,
        np.arange(len(samples), dtype=np.int32),
        token_ids,
        batch.num_logprobs[samples],
        None if batch.named_token_ids is None else batch.named_token_ids[samples],
        num_top=_num_top(batch, values),
        chunk=len(samples),
    )


def _processed_logits(logits: Tensor, batch: SamplingBatch, samples: Int64) -> Tensor:
    """Return the logits [k, V] from which ``samples`` [k] are drawn: edited, divided by the
    temperature, filtered. The logits of samples with temperature 0 are only edited.

    Returns:
        float32 [k, V], -inf for excluded tokens. ``logits`` is not changed.
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
