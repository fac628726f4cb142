"""What tells one model folder from another: read from its files, without loading them."""

from __future__ import annotations

import hashlib
import os.path
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.job.spec.spec import ModelSpec

_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_MAX_HEADER = 100 << 20  # the safetensors format's own limit


def model_facts(model: ModelSpec) -> dict[str, Any]:
    """Facts that differ where the outputs of two models may, as JSON data.

    A folder: size and safetensors header of each weight file, and the hash of each configuration
    and tokenizer file. A hub id: its name and revision as written.

    Raises:
        ModelError: the folder is not there, or a file in it cannot be read.
    """
    facts = {"model": _facts_of(model.name, model.revision, "model.name")}
    if model.tokenizer is not None:
        facts["tokenizer"] = _facts_of(model.tokenizer, None, "model.tokenizer")
    if model.adapters:
        facts["adapters"] = {
            name: _adapter_facts(path, f"model.adapters.{name}")
            for name, path in model.adapters.items()
        }
    return facts


def _adapter_facts(name: str, key: str) -> dict[str, Any]:
    """Adapters are small, and trained again into the same folder: all that is read is hashed."""
    folder = Path(name)
    if not os.path.isdir(folder):
        return _facts_of(name, None, key)
    try:
        return {
            file: _digest_of(folder / file) if (folder / file).exists() else None
            for file in ("adapter_config.json", "adapter_model.safetensors")
        }
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _facts_of(name: str, revision: str | None, key: str) -> dict[str, Any]:
    folder = Path(name)
    if not os.path.isdir(folder):  # unlike Path.is_dir, false for names no folder can have
        if folder.is_absolute():  # found before --overwrite deletes anything
            raise ModelError(f"{key}: there is no folder {name}; check the path")
        return {"name": name, "revision": revision}
    try:
        weights = {path.name: _weight_facts(path) for path in sorted(folder.glob("*.safetensors"))}
        small = sorted(path for pattern in _SMALL_FILES for path in folder.glob(pattern))
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in small}
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error
    return {**weights, **hashes}


def _weight_facts(path: Path) -> list[int | str]:
    """Size of the file and hash of its header, which names the tensors and their places."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, _MAX_HEADER))
    return [path.stat().st_size, hashlib.sha256(header).hexdigest()]
