"""Tokens that grammars forbid."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.step import Int32
from batchinfer.kernels.cpu import native, row_ops
from batchinfer.worker.transfer import to_device


def forbid_masked(logits: Tensor, rows: Int32, masks: Int32, chunk: int) -> None:
    """Set the logits of tokens that are not in their row's mask to -inf, in place.

    Args:
        logits: [R, V] floating point.
        rows: [M] ascending, of the R.
        masks: [M, words] bit ``i % 32`` of word ``i // 32`` is set where token ``i`` may come; a
            token beyond the last word may not.
        chunk: rows to work on at a time.
    """
    if not logits.is_cuda and native.supports(logits.dtype):
        row_ops.forbid_masked(logits, torch.from_numpy(rows), torch.from_numpy(masks))
        return
    words = -(-logits.shape[1] // 32)
    lacking = max(words - masks.shape[1], 0)
    masks = np.pad(masks, ((0, 0), (0, lacking)))[:, :words]
    for low in range(0, len(rows), chunk):
        mine = slice(low, low + chunk)
        on = to_device(
            {"bytes": masks[mine].view(np.uint8), "rows": rows[mine].astype(np.int64)},
            logits.device,
        )
        table = _forbidden_of_bytes(logits.device)
        forbidden = table[on["bytes"].int()].view(torch.bool)[:, : logits.shape[1]]
        first, last = int(rows[mine][0]), int(rows[mine][-1])
        if last - first + 1 == len(rows[mine]):  # most often: nothing is copied
            logits[first : last + 1].masked_fill_(forbidden, -torch.inf)
        else:
            kept = logits.index_select(0, on["rows"]).masked_fill_(forbidden, -torch.inf)
            logits.index_copy_(0, on["rows"], kept)


@cache
def _forbidden_of_bytes(device: torch.device) -> Tensor:
    """int64 [256]: of each byte of a mask, eight bools in one number, true where its bit is not
    set; looking them up is the fastest way to unpack bits that torch has."""
    absent = np.unpackbits(~np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(absent.view(np.int64)[:, 0].copy()).to(device)
