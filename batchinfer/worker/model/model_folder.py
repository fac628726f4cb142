"""Finds or downloads a model's folder, and reads its config.json and other JSON files."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError, one_line

CONFIG_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Patterns of the files that configure a model and its tokenizer."""
ALL_FILES = (*CONFIG_FILES, "*.safetensors")


def resolve_folder(
    name: str,
    revision: str | None,
    patterns: tuple[str, ...] = ALL_FILES,
    *,
    key: str = "model.name",
) -> Path:
    """Return the model's folder: ``name`` itself, or the folder that it was downloaded to.

    Args:
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
"""Families whose published models refer to their own code, because they are older than
transformers' class. transformers' class runs instead of that code."""


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
