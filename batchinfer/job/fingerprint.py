"""Fingerprint of a job: a hash of what changes its output. A run may only continue its equal.

Inputs (checked file by file elsewhere), error limits, the order rows run in, pool sizes and logging
are left out: any of them may change between two runs of one job. What tells one model folder from
another is read from its files, without loading them.
"""

from __future__ import annotations

import hashlib
import json
import os.path
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from batchinfer.console.format import printable
from batchinfer.errors import ModelError, UsageError
from batchinfer.job.spec.spec import JobSpec, ModelSpec, resolved

MAJOR_VERSION = 0
"""Major version of batchinfer: output of different ones does not mix."""

_KEYS: Mapping[str, tuple[str, ...] | None] = {
    "task": None,
    # Name, revision and tokenizer are told apart by what they hold: ``model_facts``.
    "model": (
        *("dtype", "max_model_len", "quantization", "adapters", "trust_remote_code"),
        "served_model_name",
    ),
    "input": ("format", "id_column", "filter", "keep_columns", "limit"),
    "prompt": None,
    "sampling": None,
    "accept": None,
    "score": None,
    "engine": ("kv_cache_dtype", "deterministic"),
    "output": ("format", "rows_per_part", "explode", "include", "rename"),
}
"""Section: its keys that change output; None: all of them."""
_SAME = {"fp8_e4m3": "fp8"}
"""Values of ``engine.kv_cache_dtype`` that are another by a longer name."""

_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_MAX_HEADER = 100 << 20  # the safetensors format's own limit


def fingerprint_facts(spec: JobSpec, model_facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that changes the output, as JSON data.

    Args:
        model_facts: JSON data that tells models apart by content: the hub commit, or names, sizes
            and header hashes of the weight files; the tokenizer's hash; the adapters' hashes.

    Raises:
        UsageError: the file of ``prompt.chat_template`` cannot be read.
    """
    everything = resolved(spec)
    facts: dict[str, Any] = {"batchinfer_major_version": MAJOR_VERSION}
    # A task that came later adds its section to its own jobs: others stay what they were.
    own = {spec.task_spec.section: None} if spec.task_spec.section else {}
    for section, keys in {**_KEYS, **own}.items():
        value = everything[section]
        facts[section] = value if keys is None else {key: value[key] for key in keys}
    if spec.prompt.chat_template not in ("auto", "none"):
        facts["prompt"]["chat_template"] = _digest_of(Path(spec.prompt.chat_template))
    held = dict(model_facts)
    engine = facts["engine"]
    engine["kv_cache_dtype"] = _SAME.get(engine["kv_cache_dtype"], engine["kv_cache_dtype"])
    facts["model"]["adapters"] = held.pop("adapters", {})  # what they hold, not where they are
    facts["model_facts"] = held
    return facts


def digest(facts: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of ``fingerprint_facts`` as they are, or as a manifest holds them."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[object, object]]:
    """Keys whose values differ between two ``fingerprint_facts``, like ``sampling.top_p``, in
    order; and both values, None where there is none."""
    found = dict(_differing("", before, after))
    return {key: found[key] for key in sorted(found)}


def _differing(prefix: str, before: Any, after: Any) -> Iterator[tuple[str, tuple[object, object]]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in before.keys() | after.keys():
            path = f"{prefix}.{key}" if prefix else key
            if key not in before or key not in after:
                yield path, (before.get(key), after.get(key))
            else:
                yield from _differing(path, before[key], after[key])
    elif before != after:
        yield prefix, (before, after)


def _digest_of(path: Path) -> str:
    try:
        return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        where = printable(str(path), 200)
        raise UsageError(f"prompt.chat_template: {where}: {error.strerror}") from None


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
            file: _digest_of_file(folder / file) if (folder / file).exists() else None
            for file in ("adapter_config.json", "adapter_model.safetensors")
        }
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error


def _digest_of_file(path: Path) -> str:
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
