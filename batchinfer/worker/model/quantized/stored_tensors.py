"""Tensors that are read from weight files on demand, and quantized weights that consist of them."""

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
_FLOAT_SCALES = (*FLOATS, "F8_E4M3", "F8_E8M0")
Tensors = Mapping[str, torch.Tensor]
"""The tensors of a weight, keyed by suffix."""


class Stored:
    """A tensor in an open safetensors file. Each time the tensor is indexed, it is read from the
    file."""

    def __init__(self, file: Any, name: str) -> None:
        header = file.get_slice(name)
        self._file, self.name = file, name
        self.shape: tuple[int, ...] = tuple(header.get_shape())
        self.dtype: str = header.get_dtype()
        """The dtype's name in safetensors, such as ``F32``, ``BF16``, ``F8_E4M3`` or ``U8``."""

    def read(self, expert: int | None = None) -> torch.Tensor:
        """Read the tensor, or one expert's part of the tensor. All experts share a tensor with
        fewer than 2 dimensions."""
        tensor: torch.Tensor
        if expert is None or len(self.shape) < 2:
            tensor = self._file.get_tensor(self.name)
        else:
            tensor = self._file.get_slice(self.name)[expert : expert + 1][0]
        return tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.read()[index]


def stored_tensors(path: Path) -> Iterator[Stored]:
    """Yield the tensors of a safetensors file without reading their numbers."""
    file: Any = safe_open(path, framework="pt", device="cpu")
    return (Stored(file, name) for name in file.keys())  # noqa: SIM118 - file is not a mapping


@dataclass(frozen=True)
class Quantized:
    """A quantized weight that consists of several tensors with checked headers."""

    shape: tuple[int, ...]
    """Shape of the weight: [out, in], or [experts, out, in]."""
    parts: Mapping[str, Stored]
    """The weight's tensors, keyed by suffix. If the weight has experts, the tensors' first
    dimension is the expert."""
    dequantize: Callable[[Tensors], torch.Tensor]
    """Converts the tensors of the weight, or of one expert, to the weight in float32."""
    by_expert: bool = False
    low_bit: Callable[[Tensors], LowBitCodes] | None = None
    """Converts the tensors of the weight, or of one expert, to codes [out, in] for a low-bit
    kernel. The codes times their scales equal the weight up to rounding. None if no kernel supports
    the codes."""

    @classmethod
    def of_low_bit(
        cls,
        shape: tuple[int, ...],
        parts: Mapping[str, Stored],
        low_bit: Callable[[Tensors], IntegerWeight | BlockWeight],
    ) -> Quantized:
        """Make a weight whose codes are integers or float8 blocks."""

        def dequantize(tensors: Tensors) -> torch.Tensor:
            return low_bit(tensors).dequantize()

        return cls(shape, parts, dequantize, len(shape) > 2, low_bit)

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Read the weight in float32, or, if experts are dequantized one at a time, in ``dtype``.

        Raises:
            ModelError: a scale is NaN or infinite.
        """
        if not self.by_expert:
            return self.dequantize(self._tensors())
        out = torch.empty(self.shape, dtype=dtype)
        for expert, weight in enumerate(out):
            weight.copy_(self.dequantize(self._tensors(expert)))
        return out

    def read_low_bit(self) -> LowBitCodes | None:
        """Read the weight's codes. Return None for a weight without low-bit codes or with
        experts."""
        if self.low_bit is None or self.by_expert:
            return None
        return self.low_bit(self._tensors())

    def read_expert(self, expert: int) -> tuple[torch.Tensor, LowBitCodes | None]:
        """Read an expert's weight in float32, and the weight's codes or None."""
        tensors = self._tensors(expert)
        return self.dequantize(tensors), None if self.low_bit is None else self.low_bit(tensors)

    def _tensors(self, expert: int | None = None) -> Tensors:
        tensors = {end: part.read(expert) for end, part in self.parts.items()}
        for end, part in self.parts.items():
            # A NaN scale would make all logits of every row NaN.
            is_scale = end and part.dtype in _FLOAT_SCALES  # some codes are floats too
            if is_scale and not torch.isfinite(tensors[end].float()).all():
                raise ModelError(f"{part.name} contains NaN or infinity; fetch the model again")
        return tensors


def part_of(weight: str, parts: Mapping[str, Stored], end: str) -> Stored:
    """Return a weight's tensor with the suffix ``end``.

    Raises:
        ModelError: the tensor is missing.
    """
    if end not in parts:
        present = ", ".join(sorted(part.name for part in parts.values()))
        raise ModelError(
            f"{weight} is quantized, and the weight files have {present}, but no tensor "
            f"{f'*{end}' if end else weight}; fetch the model again"
        )
    return parts[end]


def check_part(part: Stored, shape: tuple[int, ...], *dtypes: str) -> None:
    """Check the shape and dtype of a weight's tensor.

    Raises:
        ModelError: the shape or dtype is wrong. The message states the actual and the expected
            values.
    """
    if part.shape == shape and part.dtype in dtypes:
        return
    raise ModelError(
        f"{part.name} is {_in_words(part.shape)} of {part.dtype}; according to "
        "config.json (quantization_config) and the layer's other tensors, it must "
        f"be {_in_words(shape)} of {' or '.join(dtypes)}; take config.json and the "
        "safetensors files from the same model"
    )


def _in_words(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def experts_and_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape as (experts, out, in) or (out, in). Missing dimensions become 1."""
    return (1, 1, *shape)[-max(len(shape), 2) :]
