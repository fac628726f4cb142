"""Samples by the Triton kernels, for CUDA: edited logits in one launch, tokens in one more.

All that the host knows of a step's samples goes over in one copy. Samples whose logits are edited
have a launch of their own, more than one where their rows of edited logits take too much memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.step import Bool, Int32, Int64, SamplingBatch
from batchinfer.worker.sampling.groups import starts_distribution
from batchinfer.worker.sampling.logits_processors import edited_samples
from batchinfer.worker.sampling.logprobs import RowStats
from batchinfer.worker.sampling.output import Draws
from batchinfer.worker.transfer import to_device

_Arrays = dict[str, npt.NDArray[np.generic]]

_EDITED_ELEMENTS = 2**26
"""Most logits that room is made for at a time where some are edited."""
_ROW_BYTES, _TILE_BYTES, _MOST_FOUND_BYTES = 64, 8, 2**16
"""What the kernel takes for a row, for each 128 of its logits, and most for what it finds there."""
_KEYS = ("seed", "stream", "sample_index", "position")


def workspace_bytes(rows: int, vocab: int) -> int:
    """Most bytes that drawing from ``rows`` rows of ``vocab`` logits takes on the device."""
    tiles = -(-vocab // 128)
    # Segments of tiles are a power of two, with room for 256 values and ids each.
    found = min(_MOST_FOUND_BYTES, 2 * tiles * 256 * 8)
    edited = min(rows * vocab, max(vocab, _EDITED_ELEMENTS))
    a_bit_each = rows * 4 + edited // 8
    return rows * (_ROW_BYTES + tiles * _TILE_BYTES + found) + edited * 4 + a_bit_each


def draw_on_device(logits: Tensor, batch: SamplingBatch) -> Draws:
    """Draw every sample. No wait, and no operation whose size the device decides.

    Args:
        logits: [R, V] on a CUDA device; what masks forbid becomes -inf.
        batch: how to draw K samples.
    """
    groups = list(_groups(batch, edited_samples(batch), logits.shape[1]))
    on = _to_device_in_one(batch, groups, logits.device)
    if len(batch.masked_rows):
        from batchinfer.kernels.forbid_masked import forbid_masked

        forbid_masked(logits, on["masked_rows"], on["masks"])
    keys = _only(on, _KEYS)
    count = len(batch.logits_rows)
    # Each where an allocation begins: Triton compiles anew for an address that is not aligned.
    maximum, max_logprob = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    draws = Draws(
        token_ids=logits.new_empty(count, dtype=torch.int64),
        logprobs=logits.new_empty(count, dtype=torch.float32),
        failures=logits.new_empty(count, dtype=torch.int32),
        stats=RowStats(maximum, max_logprob, None),
    )
    for number, group in enumerate(groups):
        own = {name: on[f"{name} {number}"] for name in group.arrays}
        _launch(logits, group, own, keys, on.get("given"), draws)
    return draws


@dataclass(frozen=True, slots=True)
class _Group:
    """Distributions of a launch: arrays that `sample` takes, and those that `edit_logits` does."""

    arrays: _Arrays
    draws: tuple[str, ...]
    edits: tuple[str, ...]
    has_draws: bool
    has_filters: bool


def _launch(
    logits: Tensor,
    group: _Group,
    own: Mapping[str, Tensor],
    keys: Mapping[str, Tensor],
    given: Tensor | None,
    into: Draws,
) -> None:
    from batchinfer.kernels.edit_logits import edit_logits
    from batchinfer.kernels.sample import sample

    edits = edit_logits(logits, **_only(own, group.edits)) if group.edits else None
    sample(
        logits, **_only(own, group.draws), **keys, given=given, edits=edits,
        draws=group.has_draws, filters=group.has_filters,
        maximum=into.stats.maximum, max_logprob=into.stats.max_logprob,
        token_ids=into.token_ids, logprobs=into.logprobs, failures=into.failures,
    )  # fmt: skip


def _only(tensors: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names}


def _to_device_in_one(
    batch: SamplingBatch, groups: list[_Group], device: torch.device
) -> dict[str, Tensor]:
    arrays: _Arrays = {
        "seed": batch.seed.view(np.int64),
        "stream": batch.stream.view(np.int64),
        "sample_index": batch.sample_index,
        "position": batch.position,
    }
    if batch.given_token_ids is not None:
        arrays["given"] = batch.given_token_ids
    if len(batch.masked_rows):
        arrays |= {"masked_rows": batch.masked_rows, "masks": batch.masks}
    for number, group in enumerate(groups):
        arrays |= {f"{name} {number}": array for name, array in group.arrays.items()}
    return to_device(arrays, device)


def _groups(batch: SamplingBatch, edited: Bool, vocab: int) -> Iterator[_Group]:
    """Those whose logits are the model's, then those whose are edited."""
    plain = np.flatnonzero(~edited)
    if len(plain) > 0:
        yield _group(batch, edited, plain, vocab)
    others = np.flatnonzero(edited)
    size = max(1, _EDITED_ELEMENTS // vocab)
    for low in range(0, len(others), size):
        yield _group(batch, edited, others[low : low + size], vocab)


def _group(batch: SamplingBatch, edited: Bool, samples: Int64, vocab: int) -> _Group:
    first = starts_distribution(batch, edited, samples)
    heads = samples[first]
    draws: _Arrays = {
        "rows": batch.logits_rows[heads],
        **{name: getattr(batch, name)[heads] for name in batch.DISTRIBUTION},
        "starts": np.append(np.flatnonzero(first), len(samples)).astype(np.int32),
        "samples": samples.astype(np.int32),
    }
    edits = _edits(batch, heads, vocab) if edited[samples[0]] else {}
    top_k = batch.top_k[heads]
    has_draws = bool((batch.temperature[heads] > 0).any())
    filtered = ((top_k > 0) & (top_k < vocab)) | (batch.top_p[heads] < 1)
    return _Group(
        arrays=draws | edits,
        draws=tuple(draws),
        edits=tuple(edits),
        has_draws=has_draws,
        has_filters=bool((filtered & (batch.temperature[heads] > 0)).any()),
    )


def _edits(batch: SamplingBatch, heads: Int64, vocab: int) -> _Arrays:
    """What `edit_logits` takes for the distributions of these samples."""
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
        **_seen_tokens(batch, place),
    }
    for name, (owners, token_ids) in lists.items():
        kept = owners >= 0
        ids, owners = token_ids[kept], owners[kept]
        # On a GPU an index out of range takes the whole process with it.
        assert len(ids) == 0 or 0 <= ids.min() <= ids.max() < vocab, "token id not in the model"
        arrays[f"{name}_ids"] = ids[np.argsort(owners, kind="stable")]
        ends = np.bincount(owners, minlength=len(heads)).cumsum()
        arrays[f"{name}_starts"] = np.append(0, ends).astype(np.int32)
    return arrays


def _seen_tokens(batch: SamplingBatch, place: Int64) -> dict[str, tuple[Int64, Int32]]:
    """Tokens that penalties look back at, and whose they are; -1 = of no distribution here."""
    seen = {}
    for name in ("prompt", "output"):
        owners, token_ids = np.empty(0, np.int64), np.empty(0, np.int32)
        if batch.penalties is not None:
            padded = getattr(batch.penalties, f"{name}_token_ids")
            owners = np.repeat(place[batch.penalties.samples], (padded >= 0).sum(1))
            token_ids = padded[padded >= 0]
        seen[name] = (owners, token_ids)
    return seen
