"""What tells one model from another: hashes of what its files hold, or its commit on the hub.

The files are read, and nothing of them is loaded.
"""

from __future__ import annotations

import hashlib
import os.path
from pathlib import Path
from typing import Any

from batchinfer.console.format import near_path
from batchinfer.console.phases import phase
from batchinfer.errors import ModelError
from batchinfer.job.model_files.hub_commit import hub_commit
from batchinfer.job.spec.spec import ModelSpec
from batchinfer.job.storage.content_hash import content_hash

NUM_HEADER_FACTS = 2
"""Of a weight file: its size and the hash of its header; what follows is the hash of all of it."""
COMMIT = "commit"
"""Key of the commit, among the facts of a model on the hub."""

_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_FILES = (*_SMALL_FILES, "*.safetensors")
_MODULE_FILES = ("[0-9]*_*/config.json", "[0-9]*_*/*.safetensors")
"""Of what sentence-transformers puts behind a model: small ones, too."""
_MAX_HEADER = 100 << 20  # the safetensors format's own limit


def model_facts(model: ModelSpec) -> dict[str, Any]:
    """Facts that differ where the outputs of two models may, as JSON data.

    A folder: size, hash of the safetensors header and hash of the content of each weight file, and
    the hash of each configuration and tokenizer file. A hub id: its name and revision as written,
    and the commit that this is, where it is known.

    Raises:
        ModelError: the folder is not there, or a file in it cannot be read.
    """
    facts = {"model": _facts_of(model.name, model.revision, "model.name")}
    if model.tokenizer is not None:
        facts["tokenizer"] = _facts_of(
            model.tokenizer, None, "model.tokenizer", weights_matter=False
        )
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
            file: _digest_of_file(folder / file) if (folder / file).exists() else None
            for file in ("adapter_config.json", "adapter_model.safetensors")
        }
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _facts_of(
    name: str, revision: str | None, key: str, *, weights_matter: bool = True
) -> dict[str, Any]:
    folder = Path(name)
    if not os.path.isdir(folder):  # unlike Path.is_dir, false for names no folder can have
        if folder.is_absolute():  # found before --overwrite deletes anything
            meant = near_path(folder) or "; check the path"
            raise ModelError(f"{key}: there is no folder {name}{meant}")
        commit = hub_commit(name, revision)
        known = {} if commit is None else {COMMIT: commit}
        return {"name": name, "revision": revision, **known}
    try:
        for path in (path for pattern in _FILES for path in folder.glob(pattern)):
            if not path.is_file():  # reading a pipe or a device would not end
                raise ModelError(f"{path} is not a file; fetch the model again")
        weights = _weights(folder, hashes=weights_matter)
        small = sorted(path for pattern in _SMALL_FILES for path in folder.glob(pattern))
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in small}
        modules = sorted(path for pattern in _MODULE_FILES for path in folder.glob(pattern))
        hashes |= {str(path.relative_to(folder)): _digest_of_file(path) for path in modules}
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error
    return {**weights, **hashes}


def _weights(folder: Path, *, hashes: bool) -> dict[str, Any]:
    """Facts of a folder's weight files, by name; with or without the hashes of their content."""
    files = sorted(folder.glob("*.safetensors"))
    facts: dict[str, Any] = {path.name: _weight_facts(path) for path in files}
    if hashes:
        num_bytes = sum(path.stat().st_size for path in files)
        with phase("hashing the model", num_bytes, "bytes") as hashing:
            for path in files:
                facts[path.name].append(content_hash(path, hashing.advance))
    return facts


def _weight_facts(path: Path) -> list[int | str]:
    """Size of the file and hash of its header, which names the tensors and their places."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, _MAX_HEADER))
    return [path.stat().st_size, hashlib.sha256(header).hexdigest()]
