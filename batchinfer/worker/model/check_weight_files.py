"""Checks that a model's safetensors files are complete before their weights are loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.worker.model.model_folder import read_json

_WEIGHT_FILE = re.compile(r"[\w.@+-]{1,200}\.safetensors")
_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20  # limit of the safetensors format


def check_weights(folder: Path) -> dict[str, str]:
    """Check that the folder's safetensors files are complete.

    Returns:
        The tensors' dtypes as safetensors writes them (``F32``, ``BF16``), keyed by tensor name.

    Raises:
        ModelError: the folder has no safetensors files, a file of the index is missing, or a file
            is truncated.
    """
    names = weight_files(folder)
    if not names:
        pickle = next(
            (path.name for pattern in ("*.bin", "*.pt*") for path in folder.glob(pattern)), None
        )
        what = f"only {pickle}, which can run code when loaded" if pickle else "no weights"
        raise ModelError(f"{folder} has {what}; convert or fetch the model as safetensors")
    dtypes: dict[str, str] = {}
    for name in names:
        dtypes |= check_file(folder / name)
    return dtypes


def file_bytes(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in weight_files(folder))


def weight_files(folder: Path) -> list[str]:
    """Return the names of the folder's safetensors files. If the folder has an index, return only
    the files that the index lists.

    Raises:
        ModelError: the index is damaged, or names files outside the folder.
    """
    index = read_json(folder / "model.safetensors.index.json")
    if index is None:
        return sorted(path.name for path in folder.glob("*.safetensors"))
    by_tensor = index.get("weight_map")
    names = by_tensor.values() if isinstance(by_tensor, Mapping) else [None]
    if not all(isinstance(name, str) and _WEIGHT_FILE.fullmatch(name) for name in names):
        raise ModelError(
            f"{folder}/model.safetensors.index.json: weight_map must map tensors to names of "
            "safetensors files; fetch the model again"
        )
    return sorted(set(names))


def check_file(path: Path) -> dict[str, str]:
    """Check that a safetensors file has the size that its header states.

    Returns:
        The tensors' dtypes as safetensors writes them, keyed by tensor name.

    Raises:
        ModelError: the file is missing, truncated, or not a safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            raw = file.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b""
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing, but the model's index names it; fetch the model again"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header: Mapping[str, Any] = json.loads(raw)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        dtypes = {name: str(entry["dtype"]) for name, entry in tensors.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file; fetch the model again") from error
    expected = _HEADER_LENGTH_BYTES + header_bytes + end
    if size != expected:
        raise ModelError(
            f"{path} has {size} bytes, but its header says {expected}; fetch the model again"
        )
    return dtypes
