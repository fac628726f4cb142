"""AWQ's weights of 4 bits, in the layout that AutoAWQ calls ``gemm``.

From AutoAWQ's ``awq/modules/linear/gemm.py`` and ``awq/utils/packing_utils.py``: a 32-bit word
holds eight neighbouring outputs in the order 0, 2, 4, 6, 1, 3, 5, 7; numbers, zeros and scales are
saved with inputs, or groups of them, first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from batchinfer.worker.model.quantized.config_key import group_size, one_of
from batchinfer.worker.model.quantized.low_bit import IntegerWeight
from batchinfer.worker.model.quantized.stored import (
    Quantized,
    Stored,
    Tensors,
    check_part,
    part_of,
)

_BITS, _PER_WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of its eight outputs stands."""


class Awq:
    """AWQ's ``gemm`` layout.

    Args:
        saved: config.json's ``quantization_config``.

    Raises:
        ModelError: naming the key: another number of bits, or another layout.
    """

    name = "awq"
    ends: Mapping[str, str] = {f".{part}": ".weight" for part in ("qweight", "qzeros", "scales")}

    def __init__(self, saved: Mapping[str, Any]) -> None:
        one_of(saved, "bits" if "bits" in saved else "w_bit", (_BITS,))
        one_of({"version": str(saved.get("version", "gemm")).lower()}, "version", ("gemm",))
        one_of(saved, "zero_point", (True,), default=True)
        self._group_size = group_size(saved)

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Quantized | None:
        if "" in parts:
            return None
        words, zeros, scales = (part_of(name, parts, end) for end in self.ends)
        inputs, num_words = words.shape if len(words.shape) == 2 else (0, 0)
        groups = inputs // (self._group_size or max(inputs, 1))
        check_part(words, (inputs, num_words), "I32")
        check_part(zeros, (groups, num_words), "I32")
        check_part(scales, (groups, num_words * _PER_WORD), "F16", "BF16", "F32")
        return Quantized.of_low_bit((num_words * _PER_WORD, inputs), parts, _integers)


def _integers(tensors: Tensors) -> IntegerWeight:
    return IntegerWeight(
        _BITS,
        _outputs_first(tensors[".qweight"]),
        tensors[".scales"].T,
        _outputs_first(tensors[".qzeros"]),
    )


def _outputs_first(words: torch.Tensor) -> torch.Tensor:
    """[n, out / 8] words to [out, n] numbers."""
    data = words.contiguous().view(torch.uint8).view(*words.shape, 4)  # the lowest byte first
    halves = data & 0xF, data >> 4
    by_output = [halves[place % 2][..., place // 2] for place in _PLACES]
    return torch.stack(by_output, dim=-1).flatten(1).T
