"""Renames keys of the job file in messages, for users of ``run-batch``, who have no job file."""

from __future__ import annotations

import re
from collections.abc import Mapping

from batchinfer.config import ClassifyConfig, EmbedConfig, EngineConfig, PromptConfig
from batchinfer.config.options import BATCH_ENGINE_KEYS, MODEL_KEYS
from batchinfer.job.spec.sections import ErrorsSpec, JobSampling
from batchinfer.job.spec.spec import InputSpec, ModelSpec, OutputSpec

_SECTIONS: Mapping[str, type] = {
    "model": ModelSpec,
    "input": InputSpec,
    "prompt": PromptConfig,
    "sampling": JobSampling,
    "embed": EmbedConfig,
    "classify": ClassifyConfig,
    "engine": EngineConfig,
    "output": OutputSpec,
    "errors": ErrorsSpec,
}
_KEYS = {
    f"{section}.{name}"
    for section, record in _SECTIONS.items()
    for base in record.__mro__
    for name in getattr(base, "__annotations__", ())
}
_KEY = re.compile(rf"\b(?:{'|'.join(_SECTIONS)})\.[a-z_]+\b")


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


_OPTIONS: Mapping[str, str] = {
    **{f"model.{key}": _option(key) for key in (*MODEL_KEYS, "served_model_name")},
    **{f"engine.{key}": _option(key) for key in BATCH_ENGINE_KEYS},
    "engine.kv_cache_memory": "--num-kv-blocks",  # the other way to set the size of the pool
    "model.name": "--model",
    "input.path": "-i",
    "prompt.chat_template": "--chat-template",
    "prompt.chat_template_kwargs": "--default-chat-template-kwargs",
    "sampling.max_tokens": "--max-tokens or body.max_tokens",
    "sampling.seed": "--seed or body.seed",
    "output.path": "-o",
    "output.reasoning": "--reasoning-parser",
    "output.tool_parser": "--tool-call-parser",
    "errors.max_error_rate": "--max-error-rate",
}
"""Options of ``run-batch``, by their keys in the job file."""
_FIXED = ("input.format", "output.format")
"""Keys that ``run-batch`` sets itself."""
_OWN_NAME = re.compile(r"\S+ \(run-batch: ([^)]+)\)")


def for_run_batch(message: str) -> str:
    """Return a message about a job with the names that a user of ``run-batch`` knows.

    Keys of the job file become options, and sampling parameters become fields of the request. If
    the message names other keys, a sentence says how to set them.
    """
    missing = list[str]()

    def name(match: re.Match[str]) -> str:
        key = match.group()
        if key in _OPTIONS:
            return _OPTIONS[key]
        if key in _KEYS and key.startswith("sampling."):
            return key.replace("sampling.", "body.")
        if key in _FIXED:
            return key
        if key in _KEYS and key not in missing:
            missing.append(key)
        return key

    renamed = _KEY.sub(name, _OWN_NAME.sub(r"\1", message)).replace("body: body.", "body.")
    renamed = re.sub(r"(--[a-z-]+), \1\b", r"\1", renamed)
    if not missing:
        return renamed
    return (
        f"{renamed}\nrun-batch has no option for {' and '.join(missing)}: use a job file with "
        "input.format: openai-batch"
    )
