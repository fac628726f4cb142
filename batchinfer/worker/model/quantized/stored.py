"""Tensors of weight files before they are read, and weights made of several such tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from batchinfer.errors import ModelError
from batchinfer.worker.model.quantized.low_bit import BlockWeight, IntegerWeight, LowBitCodes

FLOATS = ("F32", "F16", "BF16")
Tensors = Mapping[str, torch.Tensor]
"""The tensors of a weight, by suffix."""


class Stored:
    """A tensor ``name`` in a file opened by ``safe_open``, read each time it is indexed."""

    def __init__(self, file: Any, name: str) -> None:
        header = file.get_slice(name)
        self._file, self.name = file, name
        self.shape: tuple[int, ...] = tuple(header.get_shape())
        self.dtype: str = header.get_dtype()
        """Name in safetensors: ``F32``, ``BF16``, ``F8_E4M3``, ``U8``."""

    def read(self, expert: int | None = None) -> torch.Tensor:
        """The tensor in its own dtype; for one expert its part, or the single number for all."""
        tensor: torch.Tensor
        if expert is None or len(self.shape) < 2:
            tensor = self._file.get_tensor(self.name)
        else:
            tensor = self._file.get_slice(self.name)[expert : expert + 1][0]
        return tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.read()[index]


def stored_tensors(path: Path) -> Iterator[Stored]:
    """Yield every tensor of a safetensors file without reading its numbers."""
    file: Any = safe_open(path, framework="pt", device="cpu")
    return (Stored(file, name) for name in file.keys())  # noqa: SIM118 - it is not a mapping


@dataclass(frozen=True)
class Quantized:
    """A weight made of several tensors, whose headers are checked."""

    shape: tuple[int, ...]
    """[out, in], or [experts, out, in] and the like."""
    parts: Mapping[str, Stored]
    """The tensors by suffix. Experts are the first dimension."""
    dequantize: Callable[[Tensors], torch.Tensor]
    """Converts all parts, or those of one expert, to the weight in float32."""
    by_expert: bool = False
    """Whether experts are dequantized one at a time."""
    low_bit: Callable[[Tensors], LowBitCodes] | None = None
    """Converts all parts, or those of one expert, to [out, in] codes for a low-bit kernel, which
    are the weight except for a last rounding; None: it has no such form."""

    @classmethod
    def of_low_bit(
        cls,
        shape: tuple[int, ...],
        parts: Mapping[str, Stored],
        low_bit: Callable[[Tensors], IntegerWeight | BlockWeight],
    ) -> Quantized:
        """A weight of integers, or of float8 in blocks."""

        def dequantize(tensors: Tensors) -> torch.Tensor:
            return low_bit(tensors).dequantize()

        return cls(shape, parts, dequantize, len(shape) > 2, low_bit)

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in float32; in ``dtype`` where experts are dequantized one at a time.

        Raises:
            ModelError: a scale is not a number.
        """
        if not self.by_expert:
            return self.dequantize(self._tensors())
        out = torch.empty(self.shape, dtype=dtype)
        for expert, weight in enumerate(out):
            weight.copy_(self.dequantize(self._tensors(expert)))
        return out

    def read_low_bit(self) -> LowBitCodes | None:
        """The codes as saved; None: the weight has no such form, or is of experts."""
        if self.low_bit is None or self.by_expert:
            return None
        return self.low_bit(self._tensors())

    def read_expert(self, expert: int) -> tuple[torch.Tensor, LowBitCodes | None]:
        """One expert's weight in float32, and its saved codes; None: it has no codes."""
        tensors = self._tensors(expert)
        return self.dequantize(tensors), None if self.low_bit is None else self.low_bit(tensors)

    def _tensors(self, expert: int | None = None) -> Tensors:
        tensors = {end: part.read(expert) for end, part in self.parts.items()}
        for end, part in self.parts.items():
            # With such a scale the logits of every row would be NaN.
            is_scale = end and part.dtype in FLOATS  # codes may be stored as if they were floats
            if is_scale and not torch.isfinite(tensors[end]).all():
                raise ModelError(f"{part.name} holds NaN or infinity; fetch the model again")
        return tensors


def part_of(weight: str, parts: Mapping[str, Stored], end: str) -> Stored:
    """Return the part of a weight with a suffix.

    Raises:
        ModelError: it is missing.
    """
    if end not in parts:
        present = ", ".join(sorted(part.name for part in parts.values()))
        raise ModelError(
            f"{weight} is quantized, and the weight files have no {f'*{end}' if end else weight} "
            f"to go with {present}; fetch the model again"
        )
    return parts[end]


def check_part(part: Stored, shape: tuple[int, ...], *dtypes: str) -> None:
    """Check a part's shape and dtype.

    Raises:
        ModelError: naming the tensor, what it is and what it must be.
    """
    if part.shape == shape and part.dtype in dtypes:
        return
    raise ModelError(
        f"{part.name} is {_in_words(part.shape)} of {part.dtype}; by config.json "
        "(quantization_config) and the other tensors of its layer, it must be "
        f"{_in_words(shape)} of {' or '.join(dtypes)}; take config.json and the safetensors files "
        "from the same model"
    )


def _in_words(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def experts_and_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[experts,] out, in of a tensor's shape, filled up with ones where dimensions are missing."""
    return (1, 1, *shape)[-max(len(shape), 2) :]
