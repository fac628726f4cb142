"""Draws samples on a CUDA device with Triton kernels that edit logits and draw tokens.

All parameters of a step's samples are sent in one copy. For samples with edited logits, there are
separate launches of ``apply_penalties`` and ``sample``: one pair, or several pairs if the copies of
the logits would take too much memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.step import Int32, Int64, SamplingBatch
from batchinfer.worker.sampling.groups import SampleGroup, group_samples, is_filtered
from batchinfer.worker.sampling.logits_processors import edited_samples
from batchinfer.worker.sampling.logprobs import empty_stats
from batchinfer.worker.sampling.output import Draws
from batchinfer.worker.sampling.token_ids import check_token_ids
from batchinfer.worker.transfer import to_device

_Arrays = dict[str, npt.NDArray[np.generic]]

_EDITED_ELEMENTS = 2**26
"""Largest number of edited logits in memory at a time."""
_ROW_BYTES, _TILE_BYTES, _MOST_FOUND_BYTES = 64, 8, 2**16
"""Sizes of the kernel's workspace in bytes: for each row, for every 128 logits of a row, and (at
most) for all candidates of a row."""


def workspace_bytes(rows: int, vocab: int) -> int:
    """Return an upper bound on the device memory, in bytes, for drawing from ``rows`` rows of
    ``vocab`` logits."""
    tiles = -(-vocab // 128)
    # A row has at most as many segments as tiles, rounded up to a power of two. Each segment has
    # space for 256 values and ids.
    candidates = min(_MOST_FOUND_BYTES, 2 * tiles * 256 * 8)
    edited = min(rows * vocab, max(vocab, _EDITED_ELEMENTS))
    a_bit_each = rows * 4 + edited // 8
    return rows * (_ROW_BYTES + tiles * _TILE_BYTES + candidates) + edited * 4 + a_bit_each


def draw_on_device(logits: Tensor, batch: SamplingBatch) -> Draws:
    """Draw every sample. The host does not wait, because no size depends on data on the device.

    Args:
        logits: [R, V] on a CUDA device; tokens that masks forbid become -inf.
        batch: parameters of the K samples.
    """
    from batchinfer.kernels.penalties import apply_penalties
    from batchinfer.kernels.sample import sample

    count, vocab = len(batch.logits_rows), logits.shape[1]
    edited, drawn = edited_samples(batch), batch.temperature > 0
    filtered = is_filtered(batch, vocab) & drawn
    groups = [
        *group_samples(batch, edited, ~edited, count),
        *group_samples(batch, edited, edited, max(1, _EDITED_ELEMENTS // vocab)),
    ]
    arrays = {"batch": _batch_arrays(batch), "masks": _mask_arrays(batch)}
    for number, group in enumerate(groups):
        arrays[f"draws {number}"] = _draw_arrays(batch, group)
        has_edits = edited[group.samples[0]]
        arrays[f"edits {number}"] = _edit_arrays(batch, group.heads, vocab) if has_edits else {}
    on = _to_device_in_one(arrays, logits.device)
    if on["masks"]:
        from batchinfer.kernels.token_bitmask import apply_token_bitmask

        apply_token_bitmask(logits, **on["masks"])
    draws = Draws(
        token_ids=logits.new_empty(count, dtype=torch.int64),
        logprobs=logits.new_empty(count, dtype=torch.float32),
        failures=logits.new_empty(count, dtype=torch.int32),
        stats=empty_stats(logits),
    )
    for number, group in enumerate(groups):
        edits = on[f"edits {number}"]
        sample(
            logits,
            **on[f"draws {number}"],
            **on["batch"],
            edits=apply_penalties(logits, **edits) if edits else None,
            draws=bool(drawn[group.heads].any()),
            filters=bool(filtered[group.heads].any()),
            maximum=draws.stats.maximum,
            max_logprob=draws.stats.max_logprob,
            token_ids=draws.token_ids,
            logprobs=draws.logprobs,
            failures=draws.failures,
        )
    return draws


def _to_device_in_one(
    arrays: Mapping[str, _Arrays], device: torch.device
) -> dict[str, dict[str, Tensor]]:
    flat = {
        (outer, name): array for outer, inner in arrays.items() for name, array in inner.items()
    }
    on = to_device({f"{outer} {name}": array for (outer, name), array in flat.items()}, device)
    return {
        outer: {name: on[f"{outer} {name}"] for name in inner} for outer, inner in arrays.items()
    }


def _batch_arrays(batch: SamplingBatch) -> _Arrays:
    given_ids = {} if batch.given_token_ids is None else {"given": batch.given_token_ids}
    return {
        "seed": batch.seed.view(np.int64),
        "stream": batch.stream.view(np.int64),
        "sample_index": batch.sample_index,
        "position": batch.position,
        **given_ids,
    }


def _mask_arrays(batch: SamplingBatch) -> _Arrays:
    return {"rows": batch.masked_rows, "masks": batch.masks} if len(batch.masked_rows) else {}


def _draw_arrays(batch: SamplingBatch, group: SampleGroup) -> _Arrays:
    """Return the arguments of ``sample`` for the D distributions of a group."""
    return {
        "rows": batch.logits_rows[group.heads],
        **{name: getattr(batch, name)[group.heads] for name in batch.DISTRIBUTION},
        "starts": group.starts.astype(np.int32),
        "samples": group.samples.astype(np.int32),
    }


def _edit_arrays(batch: SamplingBatch, heads: Int64, vocab: int) -> _Arrays:
    """Return the arguments of ``apply_penalties`` for the distributions of the samples
    ``heads``."""
    place = np.full(len(batch.logits_rows), -1)
    place[heads] = np.arange(len(heads))
    arrays: _Arrays = {
        "rows": batch.logits_rows[heads],
        "repetition": batch.repetition_penalty[heads],
        "presence": batch.presence_penalty[heads],
        "frequency": batch.frequency_penalty[heads],
    }
    bias = place[batch.bias_samples]
    order = np.argsort(bias[bias >= 0], kind="stable")
    arrays["bias_values"] = batch.bias_values[bias >= 0][order]
    lists = {
        "bias": (bias, batch.bias_token_ids),
        "allowed": (place[batch.allowed_samples], batch.allowed_token_ids),
        "prompt": _seen_tokens(batch, place, "prompt"),
        "output": _seen_tokens(batch, place, "output"),
    }
    for name, (owners, token_ids) in lists.items():
        kept = owners >= 0
        ids, owners = token_ids[kept], owners[kept]
        check_token_ids(ids, vocab)
        arrays[f"{name}_ids"] = ids[np.argsort(owners, kind="stable")]
        ends = np.bincount(owners, minlength=len(heads)).cumsum()
        arrays[f"{name}_starts"] = np.append(0, ends).astype(np.int32)
    return arrays


def _seen_tokens(batch: SamplingBatch, place: Int64, part: str) -> tuple[Int64, Int32]:
    """Return the tokens of prompts or outputs (``part``) that penalties apply to, as the index of
    each token's distribution in the group (-1: not in this group) and the token ids."""
    if batch.penalties is None:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    padded = getattr(batch.penalties, f"{part}_token_ids")
    owners = np.repeat(place[batch.penalties.samples], (padded >= 0).sum(1))
    return owners, padded[padded >= 0]
