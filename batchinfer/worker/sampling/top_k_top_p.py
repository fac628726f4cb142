"""Applies top-k and top-p to integer weights.

Tokens have a total order: larger logits first, equal logits by ascending id. A filter keeps the
first tokens of this order, so the last kept token determines the filter's result. A whole row is
sorted only if its last kept token is not among the few most likely tokens.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.step import Float32, Int32
from batchinfer.worker.transfer import to_device

_FIRST_CANDIDATES = 256
_HIGHEST_INT32 = 2**31 - 1
_ID_MASK = 2**32 - 1
_WEIGHT_OF_MAX = 2.0**40
"""Weight of the most likely token. The weights of 2**22 tokens add up to at most 2**62, so their
sum does not overflow."""


def integer_weights(relative: Tensor) -> Tensor:
    """Return int64 weights that are proportional to ``relative``, which is overwritten.

    Args:
        relative: float32 probabilities divided by the most likely token's probability.
    """
    return relative.mul_(_WEIGHT_OF_MAX).long()


def left_out(weights: Tensor, logits: Tensor, top_k: Int32, top_p: Float32) -> Tensor:
    """Return the tokens that top-k and then top-p exclude, bool [D, V].

    Top-p keeps the smallest set of most likely tokens whose share of the weight that remains after
    top-k reaches ``top_p`` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751).

    Args:
        weights: int64 [D, V], not negative; 0 for tokens that are already excluded.
        logits: float32 [D, V], which determine the order of tokens.
        top_k: [D] 0 = all.
        top_p: [D].
    """
    vocab = weights.shape[1]
    most = np.where((top_k > 0) & (top_k < vocab), top_k, vocab).astype(np.int64)[:, None]
    size = int(most[most < vocab].max(initial=1))
    if (most == vocab).any():
        size = min(max(size, _FIRST_CANDIDATES), vocab)
    on = to_device({"most": most, "share": top_p.astype(np.float64)[:, None]}, weights.device)
    most_kept, share = on["most"], on["share"]
    last, reached = _last_kept(weights, most_likely(logits, size), most_kept, share)
    short = (~reached).nonzero()[:, 0]
    if len(short) > 0:
        order = logits[short].sort(dim=1, descending=True, stable=True).indices
        last[short], _ = _last_kept(weights[short], order, most_kept[short], share[short])
    threshold = logits.gather(1, last)
    after = torch.arange(vocab, device=last.device) > last
    return (logits < threshold) | ((logits == threshold) & after)


def _last_kept(
    weights: Tensor, candidates: Tensor, most: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the id [d, 1] of each row's last kept token, and bool [d], true if that token is among
    the candidates.

    Args:
        candidates: [d, n] ids of the n most likely tokens, in order.
    """
    size, vocab = candidates.shape[1], weights.shape[1]
    mass = weights.gather(1, candidates).cumsum(1)
    end = (most - 1).clamp(max=size - 1)
    total = torch.where(most < vocab, mass.gather(1, end), weights.sum(1, keepdim=True))
    # Both sides of the comparison are rounded to float64 in the same way.
    before = (mass.double() < share * total.double()).sum(1, keepdim=True)
    enough = (before <= end) | (size == vocab)
    return candidates.gather(1, torch.minimum(before, end)), enough[:, 0]


def most_likely(logits: Tensor, size: int) -> Tensor:
    """Return the ids of the ``size`` most likely tokens, in order.

    The vocabulary is cut into blocks. Only the ``size`` blocks with the largest maxima can contain
    one of the ``size`` most likely tokens. Blocks with equal maxima are ordered by their index.

    Args:
        logits: float32 [D, V].
        size: 0 to V.

    Returns:
        Token ids, int64 [D, size].
    """
    rows, vocab = logits.shape
    width = math.isqrt(vocab // max(size, 1))
    if width < 2:
        ids = torch.arange(vocab, device=logits.device)
        return _first_ids(logits, ids, size)
    even = vocab - vocab % width
    maxima = logits[:, :even].view(rows, -1, width).amax(2)
    if even < vocab:
        maxima = torch.cat((maxima, logits[:, even:].amax(1, keepdim=True)), dim=1)
    blocks = _first_ids(maxima, torch.arange(maxima.shape[1], device=logits.device), size)
    ids = (blocks[:, :, None] * width + torch.arange(width, device=logits.device)).flatten(1)
    values = logits.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, -torch.inf)
    return _first_ids(values, ids, size)


def _first_ids(values: Tensor, ids: Tensor, size: int) -> Tensor:
    """Return the ids of the ``size`` largest values, by descending value, then by ascending id.

    Each value gets an int64 key. The upper half of a key is an integer that sorts like the value;
    the lower half is the complement of the id. No two keys are equal, so any selection algorithm
    gives the same result.
    """
    keys = (_ascending(values).long() << 32).add_(_ID_MASK - ids)
    return _ID_MASK - (keys.topk(size, dim=1).values & _ID_MASK)


def _ascending(values: Tensor) -> Tensor:
    """Map float32 ``values`` to int32 numbers that sort in the same order."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0, because the two are equal
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(_HIGHEST_INT32))
