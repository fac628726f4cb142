"""Tensors of weight files before they are read: one that is there, one that others stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from batchinfer.errors import ModelError
from batchinfer.worker.model.quantized.low_bit import BlockWeight, IntegerWeight, LowBitCodes

_FLOATS = ("F32", "F16", "BF16")
Tensors = Mapping[str, torch.Tensor]
"""The tensors that stand for a weight, by the ends of their names."""


class Stored:
    """A tensor in a safetensors file, read each time it is indexed.

    Args:
        file: opened by ``safe_open``.
        name: the tensor's.
    """

    def __init__(self, file: Any, name: str) -> None:
        header = file.get_slice(name)
        self._file, self.name = file, name
        self.shape: tuple[int, ...] = tuple(header.get_shape())
        self.dtype: str = header.get_dtype()
        """As safetensors writes it: ``F32``, ``BF16``, ``F8_E4M3``, ``U8``."""

    def read(self) -> torch.Tensor:
        """The tensor, in its own dtype."""
        tensor: torch.Tensor = self._file.get_tensor(self.name)
        return tensor

    def read_of(self, expert: int) -> torch.Tensor:
        """What is of one expert; all of it, where it is one number for all of them."""
        if len(self.shape) < 2:
            return self.read()
        tensor: torch.Tensor = self._file.get_slice(self.name)[expert : expert + 1][0]
        return tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.read()[index]


def stored_tensors(path: Path) -> Iterator[Stored]:
    """Every tensor of a safetensors file; its numbers stay in the file."""
    file: Any = safe_open(path, framework="pt", device="cpu")
    return (Stored(file, name) for name in file.keys())  # noqa: SIM118 - it is no mapping


@dataclass(frozen=True)
class Quantized:
    """A weight that some tensors stand for together; checked by their headers.

    Args:
        shape: of the weight: [out, in], or [experts, out, in] and the like.
        parts: by the ends of their names. Those of experts have their dimension first.
        dequantize: all parts to the weight, in float32.
        by_expert: the parts of one expert to its weight.
        low_bit: all parts, or those of one expert, to what is kept where a kernel takes it, the
            weight but for a last rounding, [out, in]; None: it has no such form.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, Stored]
    dequantize: Callable[[Tensors], torch.Tensor]
    by_expert: bool = False
    low_bit: Callable[[Tensors], LowBitCodes] | None = None

    @classmethod
    def of_low_bit(
        cls,
        shape: tuple[int, ...],
        parts: Mapping[str, Stored],
        low_bit: Callable[[Tensors], IntegerWeight | BlockWeight],
    ) -> Quantized:
        """A weight of integers, or of float8 in blocks."""
        return cls(
            shape, parts, lambda tensors: low_bit(tensors).dequantize(), len(shape) > 2, low_bit
        )

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in float32; in ``dtype`` where experts are dequantized one at a time.

        Raises:
            ModelError: a scale is no number.
        """
        tensors = self._tensors()
        if not self.by_expert:
            return self.dequantize(tensors)
        out = torch.empty(self.shape, dtype=dtype)
        for expert, weight in enumerate(out):
            weight.copy_(self.dequantize({end: _of(expert, each) for end, each in tensors.items()}))
        return out

    def read_low_bit(self) -> LowBitCodes | None:
        """The weight as it is saved; None: it has no such form, or is of experts."""
        if self.low_bit is None or self.by_expert:
            return None
        return self.low_bit(self._tensors())

    def read_expert(self, expert: int) -> tuple[torch.Tensor, LowBitCodes | None]:
        """One expert's weight in float32, and as it is saved; None: it has no such form."""
        tensors = {end: part.read_of(expert) for end, part in self.parts.items()}
        self._check_scales(tensors)
        low_bit = None if self.low_bit is None else self.low_bit(tensors)
        return self.dequantize(tensors), low_bit

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {end: part.read() for end, part in self.parts.items()}
        self._check_scales(tensors)
        return tensors

    def _check_scales(self, tensors: Tensors) -> None:
        """Refuse scales that are no numbers, of which the logits of every row would become none."""
        for end, part in self.parts.items():
            is_scale = end and part.dtype in _FLOATS  # codes may be stored as if they were floats
            if is_scale and not torch.isfinite(tensors[end]).all():
                raise ModelError(f"{part.name} holds NaN or infinity; fetch the model again")


def _of(expert: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[expert] if tensor.dim() > 1 else tensor  # one number for all of them


def part_of(weight: str, parts: Mapping[str, Stored], end: str) -> Stored:
    """One of a weight's parts.

    Raises:
        ModelError: it is not there.
    """
    if end not in parts:
        there = ", ".join(sorted(part.name for part in parts.values()))
        raise ModelError(
            f"{weight} is quantized, and the weight files have no {f'*{end}' if end else weight} "
            f"beside {there}; "
            "fetch the model again"
        )
    return parts[end]


def check_part(part: Stored, shape: tuple[int, ...], *dtypes: str) -> None:
    """Check a part's shape and dtype.

    Raises:
        ModelError: naming the tensor, what it is and what it must be.
    """
    if part.shape == shape and (not dtypes or part.dtype in dtypes):
        return
    wanted = " or ".join(dtypes) or part.dtype
    raise ModelError(
        f"{part.name} is {_words(part.shape)} of {part.dtype}; by config.json "
        f"(quantization_config) and the tensors beside it, it must be {_words(shape)} of {wanted}; "
        "take config.json and the safetensors files from the same model"
    )


def _words(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"
