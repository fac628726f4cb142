"""A model's folder, or the hub's copy of one, and the JSON files in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError, one_line


def find_folder(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder of a model, or the hub's copy of those of its files that match ``patterns``.

    Raises:
        ModelError: it is not there.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        raise ModelError(f"model.name: there is no folder {folder}; check the path")
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, revision=revision, allow_patterns=list(patterns))
    except Exception as error:  # the hub client raises errors of several libraries
        raise ModelError(
            f"model.name: {name} is no local folder and cannot be fetched from the hub: "
            f"{one_line(error)}",
            hint="download it where there is a network and give the folder's path",
        ) from error
    return Path(found)


def check_regular(path: Path) -> None:
    """Check that what is there, if anything is, ends: pipes and devices do not.

    Raises:
        ModelError: it is no file.
    """
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is not a file; fetch the model again")


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where there is no such file.

    Raises:
        ModelError: it cannot be read.
    """
    check_regular(path)
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
