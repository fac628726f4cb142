"""Reads GPTQ (2, 4 or 8 bits) and AWQ (4 bits) weights: integers packed into 32-bit words.

GPTQ (source: GPTQModel's ``nn_modules/qlinear/torch.py`` and ``utils/model.py``): a word of
``qweight`` holds the integers of neighboring inputs, and a word of ``qzeros`` holds the zero points
of neighboring outputs. The first integer is in the lowest bits. The first version of the format
(``checkpoint_format: gptq``; newer tools call the key ``format``) saves each zero point minus one;
the second version (``gptq_v2``) saves the zero points themselves.

AWQ (source: AutoAWQ's ``awq/modules/linear/gemm.py`` and ``awq/utils/packing_utils.py``): a word
holds the integers of eight neighboring outputs in the order 0, 2, 4, 6, 1, 3, 5, 7. ``qweight`` has
a row for each input; ``qzeros`` and ``scales`` have a row for each group of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from batchinfer.worker.model.quantized.config_key import group_size, one_of, refused
from batchinfer.worker.model.quantized.low_bit import (
    WORD_BITS,
    IntegerWeight,
    check_groups,
    unpack,
)
from batchinfer.worker.model.quantized.stored_tensors import (
    FLOATS,
    Quantized,
    Stored,
    Tensors,
    check_part,
    part_of,
)

_AWQ_BITS = 4
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in the word of each of the word's eight outputs."""


class Gptq:
    name = "gptq"
    ends: Mapping[str, str] = {
        f".{part}": ".weight" for part in ("qweight", "qzeros", "scales", "g_idx")
    }

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self._bits: int = one_of(saved, "bits", (2, 4, 8))
        key = "checkpoint_format" if "checkpoint_format" in saved else "format"
        version = one_of(saved, key, ("gptq", "gptq_v2"), default="gptq")
        if saved.get("dynamic"):
            raise refused(
                "dynamic", saved["dynamic"], "all layers must have the same number of bits"
            )
        self._group_size = group_size(saved)
        self._zeros_less_one = version == "gptq"
        self._sorts = bool(saved.get("desc_act"))

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Quantized | None:
        if "" in parts:
            return None
        words, zeros, scales = (part_of(name, parts, end) for end in tuple(self.ends)[:3])
        per_word = WORD_BITS // self._bits
        num_words, outputs = words.shape if len(words.shape) == 2 else (0, 0)
        inputs = num_words * per_word
        groups = -(-inputs // (self._group_size or max(inputs, 1)))
        check_part(words, (num_words, outputs), "I32")
        check_part(scales, (groups, outputs), *FLOATS)
        check_part(zeros, (groups, -(-outputs // per_word)), "I32")
        if ".g_idx" in parts or (self._sorts and groups > 1):
            check_part(part_of(name, parts, ".g_idx"), (inputs,), "I32", "I64")
        return Quantized.of_low_bit((outputs, inputs), parts, partial(self._integers, name))

    def _integers(self, name: str, tensors: Tensors) -> IntegerWeight:
        scales, words = tensors[".scales"].T, tensors[".qzeros"]
        if self._zeros_less_one:
            # Add 1 to all zero points of a word at once. As in GPTQModel, a carry changes the next
            # zero point.
            ones = sum(1 << shift for shift in range(0, WORD_BITS, self._bits))
            words = words + torch.tensor(ones, dtype=torch.int64).to(torch.int32)
        zeros = unpack(words, self._bits).T[: len(scales)]
        numbers = unpack(tensors[".qweight"].T, self._bits)
        inputs, groups = numbers.shape[1], scales.shape[1]
        size = self._group_size or inputs
        in_order = torch.arange(inputs) // size
        group_of = tensors.get(".g_idx", in_order)
        check_groups(name, group_of, groups)
        are_equal = groups == 1 or groups * size == inputs
        if are_equal and torch.equal(group_of, in_order.to(group_of.dtype)):
            return IntegerWeight(self._bits, numbers, scales, zeros)
        return IntegerWeight(self._bits, numbers, scales, zeros, group_of)


class Awq:
    """The AWQ layout that AutoAWQ calls ``gemm``."""

    name = "awq"
    ends: Mapping[str, str] = {f".{part}": ".weight" for part in ("qweight", "qzeros", "scales")}

    def __init__(self, saved: Mapping[str, Any]) -> None:
        one_of(saved, "bits" if "bits" in saved else "w_bit", (_AWQ_BITS,))
        one_of({"version": str(saved.get("version", "gemm")).lower()}, "version", ("gemm",))
        one_of(saved, "zero_point", (True,), default=True)
        self._group_size = group_size(saved)

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Quantized | None:
        if "" in parts:
            return None
        words, zeros, scales = (part_of(name, parts, end) for end in self.ends)
        inputs, num_words = words.shape if len(words.shape) == 2 else (0, 0)
        groups = inputs // (self._group_size or max(inputs, 1))
        outputs = num_words * WORD_BITS // _AWQ_BITS
        check_part(words, (inputs, num_words), "I32")
        check_part(zeros, (groups, num_words), "I32")
        check_part(scales, (groups, outputs), *FLOATS)
        return Quantized.of_low_bit((outputs, inputs), parts, _awq_integers)


def _awq_integers(tensors: Tensors) -> IntegerWeight:
    numbers, zeros = (_outputs_first(tensors[end]) for end in (".qweight", ".qzeros"))
    return IntegerWeight(_AWQ_BITS, numbers, tensors[".scales"].T, zeros)


def _outputs_first(words: torch.Tensor) -> torch.Tensor:
    """Unpack words [n, out / 8] to numbers [out, n]."""
    numbers = unpack(words, _AWQ_BITS).view(len(words), -1, len(_AWQ_PLACES))
    return numbers[..., _AWQ_PLACES].flatten(1).T
