"""Finds a model's folder, and checks its files and their headers before weights are loaded."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError, one_line

CONFIG_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Patterns of a hub repository's files that configure the model and its tokenizer."""
ALL_FILES = (*CONFIG_FILES, "*.safetensors")

_WEIGHT_FILE = re.compile(r"[\w.@+-]{1,200}\.safetensors")
_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20  # limit of the safetensors format


def resolve_folder(
    name: str,
    revision: str | None,
    patterns: tuple[str, ...] = ALL_FILES,
    *,
    key: str = "model.name",
) -> Path:
    """Return the model's folder: ``name`` itself, or the folder that it was downloaded to.

    Args:
        revision: revision of the hub's repository.
        patterns: patterns of the files to download.
        key: configuration key with the name, for messages.

    Raises:
        ModelError: the folder does not exist, the hub cannot be reached, or the folder has a pipe
            or a device instead of a file.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_files(folder, patterns)
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"{key}: there is no folder {name}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises errors of several libraries
        raise ModelError(
            f"{key}: {name} is not a local folder and cannot be fetched from the hub: "
            f"{one_line(error)}",
            hint="download it on a machine with network access and use the folder's path",
        ) from error


def _check_files(folder: Path, patterns: tuple[str, ...]) -> None:
    """Refuse pipes and devices, because reading them might never end."""
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        try:
            status = path.stat()
        except OSError as error:  # a broken link, or a link to itself
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is not a file; fetch the model again")


PUBLISHED_WITH_CODE = frozenset({"deepseek_v3", "kimi_linear", "paddleocr_vl", "unlimited_ocr"})
"""Families whose published models refer to their own code, because they were published before
transformers had a class for them. The class from transformers runs instead."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the values of the folder's config.json.

    Raises:
        ModelError: the file is missing or not JSON, the model needs its own code, or the folder
            holds an adapter.
    """
    if (folder / "adapter_config.json").exists():
        # transformers would apply the adapter only if peft is installed
        raise ModelError(
            f"{folder} holds an adapter (adapter_config.json), not a model",
            hint="set model.name to the base model and add this folder to "
            "model.adapters, or use a model into which the adapter is merged",
        )
    config = read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    if "auto_map" in config and config.get("model_type") not in PUBLISHED_WITH_CODE:
        raise ModelError(
            f"{folder}/config.json needs the model's own code (auto_map), which is never run; "
            "use a model of a family that is part of transformers"
        )
    return config


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file does not exist.

    Raises:
        ModelError: the file cannot be read, or does not hold an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, MemoryError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch the model again") from error
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply; fetch the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; fetch the model again")
    return value


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
    """Return the size in bytes of the folder's safetensors files."""
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
