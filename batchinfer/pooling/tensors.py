"""Single tensors of a model's weight files, read without the rest.

The layout is that of safetensors (https://github.com/huggingface/safetensors, README): the length
of a JSON header in 8 bytes, the header with each tensor's dtype, shape and place, then the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.errors import ModelError, one_line
from batchinfer.pooling.model_folder import check_regular

Float32 = npt.NDArray[np.float32]

_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_LENGTH_BYTES = 8
_MAX_HEADER = 100 << 20  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is stored."""

    path: Path
    name: str
    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""

    def read(self, rows: Sequence[int] | None = None) -> Float32:
        """The tensor, or some of its rows, as float32.

        Raises:
            ModelError: it is of another type than floats, or cannot be read.
        """
        if self.dtype not in _STORED:
            raise ModelError(
                f"{self.path}: not yet: {self.name} is stored as {self.dtype}; heads are read of "
                "floats alone"
            )
        kind = np.dtype(_STORED[self.dtype])
        try:
            whole = np.memmap(self.path, kind, "r", self.start, self.shape)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path} cannot be read: {one_line(error)}") from error
        found = np.array(whole if rows is None else whole[list(rows)])
        if self.dtype == "BF16":  # the upper half of a float32
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found.astype(np.float32)


def find_tensor(folder: Path, *endings: str) -> StoredTensor | None:
    """The tensor whose name is, or ends with, the first of ``endings`` that one has, in a folder.

    Raises:
        ModelError: a weight file cannot be read.
    """
    stored = [one for path in _weight_files(folder) for one in _tensors(path)]
    for ending in endings:
        for one in stored:
            if f".{one.name}".endswith(f".{ending}"):
                return one
    return None


def find_part(folder: Path, *layers: str) -> StoredTensor | None:
    """A tensor other than a bias in one of some layers, whose names end with a dot.

    Raises:
        ModelError: a weight file cannot be read.
    """
    stored = (one for path in _weight_files(folder) for one in _tensors(path))
    parts = (one for one in stored if not one.name.endswith(".bias"))
    return next((o for o in parts if any(f".{at}" in f".{o.name}" for at in layers)), None)


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _tensors(path: Path) -> Iterator[StoredTensor]:
    check_regular(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            raw = file.read(length) if length <= _MAX_HEADER else b""
        header: Mapping[str, Any] = json.loads(raw)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape, (begin, end) = tuple(map(int, entry["shape"])), entry["data_offsets"]
            size = np.dtype(_STORED.get(entry["dtype"], "u1")).itemsize
            if entry["dtype"] in _STORED and end - begin != size * prod(shape):
                raise ValueError(f"{name} has not the bytes of its shape")
            yield StoredTensor(
                path, name, str(entry["dtype"]), shape, _LENGTH_BYTES + length + int(begin)
            )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is no safetensors file: {one_line(error)}") from error
