"""Fingerprint of a job: a hash of everything that changes its output.

A run resumes only an output with the same fingerprint. The hash leaves out error limits, the order
of rows, pool sizes and logging, because they may change between two runs of a job. The hash also
leaves out inputs, because the manifest compares them file by file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from batchinfer.console.format import printable
from batchinfer.errors import UsageError
from batchinfer.job.model_files.facts import COMMIT, NUM_HEADER_FACTS
from batchinfer.job.spec.spec import JobSpec, resolved

MAJOR_VERSION = 0
"""Major version of batchinfer; a run resumes only output of the same major version."""

_KEYS: Mapping[str, tuple[str, ...] | None] = {
    "task": None,
    # name, revision and tokenizer are left out, because ``model_facts`` identifies their files.
    "model": (
        *("dtype", "max_model_len", "quantization", "adapters", "trust_remote_code"),
        "served_model_name",
    ),
    "input": (
        *("format", "encoding", "encoding_errors", "delimiter", "json_field"),
        *("id_column", "filter", "keep_columns", "limit"),
    ),
    "prompt": None,
    "sampling": None,
    "accept": None,
    "score": None,
    "engine": ("kv_cache_dtype", "deterministic", "latent_cache"),
    "output": (
        "format",
        "rows_per_part",
        "explode",
        "include",
        "rename",
        "reasoning",
        "tool_parser",
    ),
}
"""Fields that change the output, grouped by section; None stands for all fields of a section."""
_ROW_SECTIONS = ("input", "prompt", "sampling", "score")
"""Sections that determine the prompt and the parameters of each row."""
_ROW_MODEL_KEYS = ("max_model_len", "adapters", "served_model_name")
"""Fields of ``model`` that are part of each row's key, or that only give the model a name."""
_FILE_KEYS = ("format", "rows_per_part", "explode", "rename")
"""Fields of ``output`` that change the files but not the answers."""
_LATER: Mapping[tuple[str, str], Any] = {
    ("sampling", "key"): "position",
    ("sampling", "max_reasoning_tokens"): None,
    ("sampling", "no_repeat_ngram_size"): 0,
    ("prompt", "tools"): None,
    ("prompt", "tools_column"): None,
    ("prompt", "tool_choice"): "auto",
    ("output", "reasoning"): "none",
    ("output", "tool_parser"): "none",
    ("prompt", "adapter"): None,
    ("prompt", "images"): None,
    ("prompt", "max_image_pixels"): 89_478_485,
    ("prompt", "mm_processor_kwargs"): {},
    ("engine", "latent_cache"): False,
    ("input", "encoding"): "utf-8",
    ("input", "encoding_errors"): "strict",
    ("input", "delimiter"): None,
    ("input", "json_field"): None,
}
"""Fields that later versions added, each with the value that leaves the output unchanged. The
fingerprint leaves out fields that have this value, so that older jobs keep their fingerprints.
"""
_REQUEST_OUTPUTS = ("logprobs", "prompt_logprobs")
"""Values of ``output.include`` that a request in an OpenAI batch file can turn on."""
_MODEL_FILE = re.compile(
    rf"model_facts\.(?P<owner>model|tokenizer)\.(?!(?:name|revision|{COMMIT})$)(?P<file>.+)"
)
_ADAPTER_FILE = re.compile(r"model\.adapters\.(?P<owner>.+)\.(?P<file>adapter_\w+\.\w+)")
"""Both patterns match keys of ``differences`` that name a file of the model or of an adapter."""
_SAME = {"fp8_e4m3": "fp8"}
"""Maps each synonym of an ``engine.kv_cache_dtype`` value to that value."""


def fingerprint_facts(
    spec: JobSpec, model_facts: Mapping[str, Any], media_root: str | None = None
) -> dict[str, Any]:
    """Return everything that changes the output, as JSON data.

    Args:
        model_facts: JSON data that identifies the model by content: the hub commit, or names, sizes
            and hashes of the weight files; the tokenizer's hash; the adapters' hashes.
        media_root: folder of the images that rows may name, if the job file sets it
            (``media_root_fact``).

    Raises:
        UsageError: the file of ``prompt.chat_template`` cannot be read.
    """
    everything = resolved(spec)
    facts: dict[str, Any] = {"batchinfer_major_version": MAJOR_VERSION}
    # Include the section of a newer task only for that task, so that older fingerprints stay valid.
    task_section = {spec.task_spec.section: None} if spec.task_spec.section else {}
    for section, keys in {**_KEYS, **task_section}.items():
        value = everything[section]
        facts[section] = value if keys is None else {key: value[key] for key in keys}
    if spec.prompt.chat_template not in ("auto", "none"):
        facts["prompt"]["chat_template"] = _digest_of(Path(spec.prompt.chat_template))
    facts["output"]["tool_parser"] = spec.tool_parser
    for (section, key), neutral in _LATER.items():
        if facts[section][key] == neutral:
            del facts[section][key]
    if media_root is not None:
        facts["input"]["media_root"] = media_root
    held = dict(model_facts)
    engine = facts["engine"]
    engine["kv_cache_dtype"] = _SAME.get(engine["kv_cache_dtype"], engine["kv_cache_dtype"])
    # Use hashes of the adapters' content instead of their paths.
    facts["model"]["adapters"] = held.pop("adapters", {})
    facts["model_facts"] = held
    return facts


def digest(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of ``fingerprint_facts``, in hex."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def answer_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return those ``fingerprint_facts`` that affect the answers of all rows.

    The result omits prompts and parameters, which are part of each row's key, and paths and file
    layout, which do not affect answers.
    """
    output = facts["output"]
    requested = _REQUEST_OUTPUTS if output["format"] == "openai-batch" else ()
    return {
        **_without(facts, _ROW_SECTIONS),
        "model": _without(facts["model"], _ROW_MODEL_KEYS),
        "model_facts": {name: _content_of(value) for name, value in facts["model_facts"].items()},
        "output": {
            **_without(output, _FILE_KEYS),
            "include": sorted({*output["include"], *requested}),
        },
    }


def adapter_digests(facts: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the SHA-256 of each adapter's content, keyed by adapter name, from
    ``fingerprint_facts``."""
    adapters = _mapping(facts["model"].get("adapters"))
    return {
        name: bytes.fromhex(digest({"adapter": _content_of(value)}))
        for name, value in adapters.items()
    }


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[object, object]]:
    """Return the keys, such as ``sampling.top_p``, in which two ``fingerprint_facts`` differ.

    Each key, in sorted order, maps to the value before and the value after; None stands for a
    missing value.
    """
    return dict(sorted(_differing("", before, after)))


def comparable(facts: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that can be compared with ``other``; both are ``fingerprint_facts``.

    Facts about the model's content that ``other`` lacks are left out: older versions did not hash
    the content of weight files, and the commit may be unknown offline. The revision is left out too
    if both dicts have the model's commit.
    """
    model_facts = {**_mapping(facts.get("model_facts"))}
    model = _mapping(model_facts.get("model"))
    known = _mapping(_mapping(other.get("model_facts")).get("model"))
    compared = {
        name: _as_known(value, known.get(name))
        for name, value in model.items()
        if name != COMMIT or COMMIT in known
    }
    section = dict(_mapping(facts.get("model")))
    # Compare only commits if both are known: a job's revision may have changed from a branch to
    # that branch's commit.
    if COMMIT in model and COMMIT in known:
        section.pop("revision", None)
        compared.pop("revision", None)
    return {**facts, "model": section, "model_facts": {**model_facts, "model": compared}}


def model_commit(facts: Mapping[str, Any]) -> str | None:
    """Return the commit of a model on the hub, from ``fingerprint_facts``; None if unknown."""
    commit = _mapping(_mapping(facts.get("model_facts")).get("model")).get(COMMIT)
    return commit if isinstance(commit, str) else None


def model_file(key: str) -> str | None:
    """Return a description of the model's file to which a key of ``differences`` belongs, such as
    ``the file config.json of the model``; None for other keys."""
    found = _MODEL_FILE.fullmatch(key)
    if found is not None:
        return f"the file {found['file']} of the {found['owner']}"
    found = _ADAPTER_FILE.fullmatch(key)
    return None if found is None else f"the file {found['file']} of the adapter {found['owner']}"


def _without(section: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}


def _content_of(facts: Any) -> Any:
    if isinstance(facts, Mapping) and COMMIT in facts:
        return {name: value for name, value in facts.items() if name != "revision"}
    return facts


def _as_known(value: Any, other: Any) -> Any:
    both = isinstance(value, list) and isinstance(other, list)
    return value[: len(other)] if both and len(other) == NUM_HEADER_FACTS else value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


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
