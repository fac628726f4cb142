"""Edits logits before temperature is applied: masks, biases, bans, allowed ids, penalties.

The meaning and order of the edits follow vLLM's ``v1/sample/sampler.py`` and
``model_executor/layers/utils.py``. A ban is a bias of -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.step import Bool, Int32, Int64, ProcessedRow, SamplingBatch
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.kernels.cpu import row_ops
from batchinfer.worker.sampling.token_ids import check_token_ids
from batchinfer.worker.transfer import to_device

_Samples = Callable[[SamplingBatch], Int32]
_Change = Callable[[Tensor, SamplingBatch, Int64], None]


def run_processors(logits: Tensor, processed: Sequence[ProcessedRow]) -> None:
    """Run users' functions on their rows of ``logits`` [R, V], in place.

    If a function sets logits of a row to +inf, only the tokens with logits of +inf remain, and all
    of them are equally likely.

    Raises:
        TypeError, ValueError: a function does not return a tensor of the logits' shape.
    """
    for item in processed:
        row = logits[item.row].float()
        for processor in item.processors:
            row = processor(item.prompt_token_ids, item.output_token_ids, row.clone())
            name = getattr(processor, "__name__", type(processor).__name__)
            if not isinstance(row, Tensor):
                raise TypeError(
                    f"logits processor {name} returned a {type(row).__name__}, not a tensor"
                )
            if row.shape != logits.shape[1:]:
                raise ValueError(
                    f"logits processor {name} returned a tensor of shape "
                    f"{tuple(row.shape)}; it must have the shape of the logits, "
                    f"{tuple(logits.shape[1:])}"
                )
        only = row.isposinf()
        logits[item.row] = torch.where(only.any(), torch.where(only, 0.0, -torch.inf), row)


def edited_samples(batch: SamplingBatch) -> Bool:
    """Return bool [K], True for samples whose logits a processor changes."""
    edited = np.zeros(len(batch.logits_rows), np.bool_)
    for samples, _ in LOGITS_PROCESSORS:
        edited[samples(batch)] = True
    return edited


def edit_logits(logits: Tensor, batch: SamplingBatch, heads: Int64) -> None:
    """Apply all processors to ``logits``, in place.

    Args:
        logits: float32 [D, V]; row d belongs to sample ``heads[d]``.
        batch: parameters of all samples; only the samples in ``heads`` are used.
        heads: [D] sample of each row.
    """
    rows = np.full(len(batch.logits_rows), -1)
    rows[heads] = np.arange(len(heads))
    for _, change in LOGITS_PROCESSORS:
        change(logits, batch, rows)


def _add_bias(logits: Tensor, batch: SamplingBatch, rows: Int64) -> None:
    applies = rows[batch.bias_samples] >= 0
    if not applies.any():
        return
    at = _entries(logits, rows[batch.bias_samples[applies]], batch.bias_token_ids[applies])
    values = to_device({"values": batch.bias_values[applies]}, logits.device)["values"]
    logits.index_put_(at, values, accumulate=True)


def _keep_allowed(logits: Tensor, batch: SamplingBatch, rows: Int64) -> None:
    applies = rows[batch.allowed_samples] >= 0
    if not applies.any():
        return
    owners = rows[batch.allowed_samples[applies]]
    at = _entries(logits, owners, batch.allowed_token_ids[applies])
    kept = logits[at]
    restricted = to_device({"rows": np.unique(owners)}, logits.device)["rows"]
    logits.index_fill_(0, restricted, -torch.inf)
    logits.index_put_(at, kept)


def _entries(logits: Tensor, rows: Int64, token_ids: Int32) -> tuple[Tensor, Tensor]:
    check_token_ids(token_ids, logits.shape[1])
    at = to_device({"rows": rows, "ids": token_ids.astype(np.int64)}, logits.device)
    return at["rows"], at["ids"]


def _penalized_samples(batch: SamplingBatch) -> Int32:
    return np.empty(0, np.int32) if batch.penalties is None else batch.penalties.samples


def _penalize(logits: Tensor, batch: SamplingBatch, rows: Int64) -> None:
    """Apply repetition, frequency and presence penalties.

    The repetition penalty (Keskar et al. 2019, arXiv:1909.05858) applies to tokens in the prompt or
    the output: positive logits are divided by the penalty, and other logits are multiplied by it.
    After the repetition penalty, as in the OpenAI API, a token that occurs c times in the output
    loses ``frequency * c``, and ``presence`` if c > 0.
    """
    samples = _penalized_samples(batch)
    applies = rows[samples] >= 0
    if batch.penalties is None or not applies.any():
        return
    samples = samples[applies]
    on = to_device(
        {
            "rows": rows[samples, None],
            "presence": batch.presence_penalty[samples, None],
            "frequency": batch.frequency_penalty[samples, None],
            "repetition": batch.repetition_penalty[samples, None],
            "prompt": batch.penalties.prompt_token_ids[applies],
            "output": batch.penalties.output_token_ids[applies],
        },
        logits.device,
    )
    output, repetition = on["output"].long(), on["repetition"]

    def repeat(_: Tensor, at: Tensor) -> Tensor:
        return torch.where(at > 0, at / repetition, at * repetition)

    _rewrite(logits, on["rows"], torch.cat((on["prompt"].long(), output), dim=1), repeat)
    counts = torch.zeros(len(samples), logits.shape[1], device=logits.device)
    counts.scatter_add_(1, output.clamp(min=0), (output >= 0).float())

    def count(ids: Tensor, at: Tensor) -> Tensor:
        return at - on["frequency"] * counts.gather(1, ids) - on["presence"]

    _rewrite(logits, on["rows"], output, count)


LOGITS_PROCESSORS: tuple[tuple[_Samples, _Change], ...] = (
    (lambda batch: batch.bias_samples, _add_bias),
    (lambda batch: batch.allowed_samples, _keep_allowed),
    (_penalized_samples, _penalize),
)
"""The processors in the order in which they are applied, each a pair of functions. The first
function returns the samples that the processor applies to. The second function changes these
samples' logits, given each sample's row [K] (-1: no row)."""


def _rewrite(
    logits: Tensor,  # float32 [D, V]
    rows: Tensor,  # int64 [P, 1], all different
    token_ids: Tensor,  # int64 [P, n], padded with -1
    change: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Replace the logits of ``token_ids`` with ``change(ids, logits of the ids)``, all [P, n]. A
    token that is listed twice gets the same value twice, so the order of writes does not matter.
    """
    if token_ids.shape[1] == 0:
        return
    # Replace padding with the row's largest token id, whose logit is then written several times,
    # with the same value. In a row with only padding, token 0 keeps its logit.
    stand_in = token_ids.amax(dim=1, keepdim=True)
    ids = torch.where(token_ids >= 0, token_ids, stand_in.clamp(min=0))
    at = logits[rows, ids]
    logits.index_put_((rows, ids), torch.where(stand_in >= 0, change(ids, at), at))


def forbid_masked(logits: Tensor, rows: Int32, masks: Int32) -> None:
    """Set the logits of tokens that are not in their row's mask to -inf, in place, on a CPU.

    Args:
        logits: [R, V] floating point.
        rows: [M] indices of rows.
        masks: [M, words] bit ``i % 32`` of word ``i // 32`` is set if token ``i`` is allowed;
            tokens beyond the last word are not allowed.
    """
    if cpu_attention.supports(logits.dtype):
        row_ops.apply_token_bitmask(logits, torch.from_numpy(rows), torch.from_numpy(masks))
        return
    for row, mask in zip(rows, masks, strict=True):
        allowed = np.unpackbits(mask.view(np.uint8), count=logits.shape[1], bitorder="little")
        logits[int(row)].masked_fill_(torch.from_numpy(allowed) == 0, -torch.inf)
