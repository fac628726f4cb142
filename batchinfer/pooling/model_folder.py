"""Finds or downloads the folder of a pooling model, and reads its JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError, one_line


def find_folder(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Return a model's folder, or a local copy of the files on the hub that match ``patterns``.

    Raises:
        ModelError: the folder does not exist, or the model cannot be fetched.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        raise ModelError(f"model.name: there is no folder {folder}; check the path")
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(name, revision=revision, allow_patterns=list(patterns))
    except Exception as error:  # the hub client raises errors of several libraries
        raise ModelError(
            f"model.name: {name} is not a local folder and cannot be fetched from the hub: "
            f"{one_line(error)}",
            hint="download it on a machine with network access and use the folder's path",
        ) from error
    return Path(snapshot)


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the content of a model's ``config.json``.

    Raises:
        ModelError: the file does not exist or cannot be read.
    """
    values = read_json(folder / "config.json")
    if not isinstance(values, Mapping):
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    return values


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it does not exist.

    Raises:
        ModelError: the file cannot be read.
    """
    check_regular(path)
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error


def check_regular(path: Path) -> None:
    """Refuse pipes and devices, because reading them may never end."""
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is not a file; fetch the model again")
