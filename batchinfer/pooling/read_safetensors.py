"""Reads single tensors from a model's safetensors files as numpy arrays, without torch.

A safetensors file (https://github.com/huggingface/safetensors, README) consists of the length of a
JSON header (8 bytes), the header with the dtype, shape and offsets of each tensor, and the bytes of
the tensors.
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

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_LENGTH_BYTES = 8
_MAX_HEADER = 100 << 20  # limit of the safetensors format


@dataclass(frozen=True, slots=True)
class StoredTensor:
    path: Path
    name: str
    dtype: str
    """Name of the dtype in safetensors, such as ``BF16``."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""

    def read(self, rows: Sequence[int] | None = None) -> Float32:
        """Return the tensor, or some of its rows, as float32.

        Raises:
            ModelError: the tensor does not contain floats, or cannot be read.
        """
        if self.dtype not in _DTYPES:
            raise ModelError(
                f"{self.path}: {self.name} is stored as {self.dtype}, which is not yet "
                "supported; heads must have a floating-point dtype"
            )
        kind = np.dtype(_DTYPES[self.dtype])
        try:
            whole = np.memmap(self.path, kind, "r", self.start, self.shape)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path} cannot be read: {one_line(error)}") from error
        values = np.array(whole if rows is None else whole[list(rows)])
        if self.dtype == "BF16":  # a bfloat16 is the upper half of a float32
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


def tensors_of(folder: Path) -> list[StoredTensor]:
    """Return all tensors in a folder's weight files.

    Raises:
        ModelError: a file cannot be read.
    """
    return [one for path in sorted(folder.glob("*.safetensors")) for one in _tensors(path)]


def find_tensor(folder: Path, *endings: str) -> StoredTensor | None:
    """Return a tensor whose name ends with one of ``endings``; earlier endings take precedence.

    Raises:
        ModelError: a weight file cannot be read.
    """
    stored = tensors_of(folder)
    for ending in endings:
        for one in stored:
            if f".{one.name}".endswith(f".{ending}"):
                return one
    return None


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
            size = np.dtype(_DTYPES.get(entry["dtype"], "u1")).itemsize
            if entry["dtype"] in _DTYPES and end - begin != size * prod(shape):
                raise ValueError(f"the size of {name} does not match its shape")
            start = _LENGTH_BYTES + length + int(begin)
            yield StoredTensor(path, name, str(entry["dtype"]), shape, start)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file: {one_line(error)}") from error
