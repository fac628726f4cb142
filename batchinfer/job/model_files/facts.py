"""Facts that identify a model: hashes of its files, or its commit on the hub.

This module reads files but does not load the model.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from batchinfer.console.format import near_path
from batchinfer.console.phases import phase
from batchinfer.errors import ModelError
from batchinfer.job.spec.spec import ModelSpec
from batchinfer.job.storage.content_hash import content_hash

NUM_HEADER_FACTS = 2
"""Number of facts before a weight file's content hash: its size and its header hash."""
COMMIT = "commit"
"""Key that holds the commit in the facts of a model on the hub."""

_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_FILES = (*_SMALL_FILES, "*.safetensors")
_MODULE_FILES = ("[0-9]*_*/config.json", "[0-9]*_*/*.safetensors")
"""Glob patterns for files of sentence-transformers modules, which are small."""
_MAX_HEADER = 100 << 20  # limit of the safetensors format
_COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
_HUB_TIMEOUT_S = 10.0


def model_facts(model: ModelSpec) -> dict[str, Any]:
    """Return JSON data that identifies a model, and differs for models whose outputs may differ.

    For a folder, the data has the size, header hash and content hash of each weight file, and the
    hash of each configuration and tokenizer file. For a hub id, the data has the name and revision
    as written, and the commit if it is known.

    Raises:
        ModelError: the folder does not exist, or a file in it cannot be read.
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
    """Return facts that identify an adapter: for a folder, a hash of each file.

    All files are hashed, because adapters are small and often retrained into the same folder.
    """
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
    if not os.path.isdir(folder):  # Path.is_dir raises for invalid names
        if folder.is_absolute():  # so that the job fails before --overwrite deletes anything
            meant = near_path(folder) or "; check the path"
            raise ModelError(f"{key}: there is no folder {name}{meant}")
        commit = hub_commit(name, revision)
        known = {} if commit is None else {COMMIT: commit}
        return {"name": name, "revision": revision, **known}
    try:
        for path in (path for pattern in _FILES for path in folder.glob(pattern)):
            if not path.is_file():  # reading a pipe could block
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
    """Return facts about a folder's weight files, keyed by name, with or without content hashes."""
    files = sorted(folder.glob("*.safetensors"))
    facts: dict[str, Any] = {path.name: _weight_facts(path) for path in files}
    if hashes:
        num_bytes = sum(path.stat().st_size for path in files)
        with phase("hashing the model", num_bytes, "bytes") as hashing:
            for path in files:
                facts[path.name].append(content_hash(path, hashing.advance))
    return facts


def _weight_facts(path: Path) -> list[int | str]:
    """Return the size of the file and the hash of its header, which lists the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, _MAX_HEADER))
    return [path.stat().st_size, hashlib.sha256(header).hexdigest()]


def hub_commit(name: str, revision: str | None) -> str | None:
    """Look up a revision's commit on the hub, or else in the local cache; None if unknown.

    Args:
        name: name of a model's repository.
        revision: a branch, a tag or a commit; None for ``main``.
    """
    if revision is not None and _COMMIT_HASH.fullmatch(revision):
        return revision
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in {"1", "ON", "YES", "TRUE"}:
        from huggingface_hub import HfApi

        try:
            return HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT_S).sha
        except Exception:  # libraries raise many types; a missing model is reported later
            pass
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / (revision or "main")).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT_HASH.fullmatch(commit) else None
