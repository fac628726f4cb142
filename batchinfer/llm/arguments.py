"""Checks the arguments of ``LLM(...)``."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.config import EngineConfig, field_names
from batchinfer.config.settings_base import coerce_fields
from batchinfer.config.structured_params import closed_schema
from batchinfer.console.format import did_you_mean
from batchinfer.llm.compatibility import settle
from batchinfer.text.reasoning.formats import PARSERS, checked_reasoning

FIT = -1
"""Value of ``max_model_len`` that allows as many tokens as fit in the KV cache."""
_SUGGESTED = (
    *("adapters", "dtype", "max_logprobs", "max_model_len", "quantization", "seed", "tokenizer"),
    *field_names(EngineConfig),
)
"""Arguments of ``LLM`` to suggest for a misspelled argument."""
_ENGINE_ALIASES: Mapping[str, str] = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_kv_blocks",
}
"""Names of engine settings in batchinfer, keyed by vLLM's names."""
_OUTLINES_WHITESPACE = "[ ]?"
"""Regex for the whitespace that vLLM's backend outlines allows between JSON tokens
(``outlines_core.json_schema.WHITESPACE``).
"""


@dataclass(frozen=True, kw_only=True)
class CallDefaults:
    """Arguments of ``LLM`` that belong to neither ``ModelConfig`` nor ``EngineConfig``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``max_logprobs`` is below -1.
    """

    max_logprobs: int | None
    seed: int | None
    skip_tokenizer_init: bool
    enable_lora: bool
    enable_prompt_embeds: bool
    generation_config: str
    override_generation_config: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        coerce_fields(self)
        most = self.max_logprobs
        if most is not None and most < -1:
            raise ValueError(f"max_logprobs is {most}; it must be 0 or more, or -1 for any number")


def dtype_name(dtype: object) -> Any:
    """Return the name of a dtype, given as a torch dtype or under any name that vLLM accepts."""
    name = str(dtype)
    return {"half": "float16", "float": "float32"}.get(name, name.removeprefix("torch."))


def model_name(model: object) -> str:
    """Return the hub id or folder of the model.

    Raises:
        TypeError: ``model`` is neither a string nor a path.
        ValueError: ``model`` is empty.
    """
    name = as_text(model)
    if not isinstance(name, str):
        raise TypeError(f"model is {reprlib.repr(name)}; it must be a string")
    if not name:
        raise ValueError("model is ''; give a hub id or a folder")
    return name


def as_text(path: Any) -> Any:
    """Return a path as a string; return other values unchanged."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def engine_config(keys: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's configuration; a value of None means the default.

    Raises:
        NotYetError: the argument exists in job files or in vLLM, but ``LLM`` does not support it.
        TypeError, ValueError: an argument is unknown, has the wrong type or is out of range.
    """
    values = {name: value for name, value in keys.items() if name not in _ENGINE_ALIASES}
    for alias, name in _ENGINE_ALIASES.items():
        value = keys.get(alias)
        if value is None:
            continue
        if values.get(name) is not None:
            raise ValueError(f"{alias} and {name} mean the same; keep one")
        values[name] = f"{value}B" if alias == "kv_cache_memory_bytes" else value
    known = field_names(EngineConfig)
    unknown = {name: value for name, value in values.items() if name not in known}
    settle("LLM", unknown, _SUGGESTED, stacklevel=4)
    return EngineConfig(
        **{name: value for name, value in values.items() if name in known and value is not None}
    )


def wants_random_weights(load_format: object) -> bool:
    """Return True if ``LLM(load_format=...)`` requests random weights; warn about other formats.

    Raises:
        NotYetError: the format is unknown.
    """
    if load_format == "dummy":
        return True
    settle("LLM", {"load_format": load_format}, (), stacklevel=4)
    return False


def template_text(template: str | os.PathLike[str] | None) -> str | None:
    """Return the template of ``LLM(chat_template=...)``, which may be a text or a file.

    Raises:
        TypeError, ValueError: the argument is neither a template nor a file.
    """
    if template is None:
        return None
    if not isinstance(template, str | os.PathLike):
        raise TypeError(
            f"chat_template is {reprlib.repr(template)}; give the text of a template, "
            "or the path of its file"
        )
    text = os.fspath(template)
    if isinstance(template, str) and ("{" in text or "\n" in text):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template: {text} cannot be read: {error}") from None


def reasoning_markers(
    reasoning: str | Mapping[str, str], parser: str | None
) -> str | Mapping[str, str]:
    """Return the setting for reasoning from ``LLM(reasoning=...)`` or
    ``LLM(reasoning_parser=...)``.

    Args:
        parser: vLLM's name of a parser; "" counts as None.

    Raises:
        ValueError: an argument is unknown, or both arguments are set.
    """
    if not parser:
        return checked_reasoning(reasoning)
    if reasoning != "none":
        raise ValueError("reasoning and reasoning_parser mean the same; keep one")
    if parser not in PARSERS:
        known = did_you_mean(parser, tuple(PARSERS))
        raise ValueError(f"reasoning_parser: {reprlib.repr(parser)} is not known{known}")
    return PARSERS[parser]


@dataclass(frozen=True, slots=True)
class SchemaDefaults:
    """Settings of an ``LLM`` for JSON schemas, used by calls that do not set them."""

    whitespace: Mapping[str, Any]
    """An entry for ``structured_outputs`` that limits whitespace; empty if whitespace is free."""
    closes_objects: bool
    """True if objects may have no properties besides the properties in their schema."""

    def apply(self, structure: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a call's ``structured_outputs`` with these defaults added."""
        completed = dict(structure)
        if "json" in completed and self.closes_objects:
            completed["json"] = closed_schema(json.loads(completed["json"]))
        is_json = "json" in completed or "json_object" in completed
        if is_json and not {"disable_any_whitespace", "whitespace_pattern"} & {*completed}:
            completed |= self.whitespace
        return completed


def schema_defaults(
    structured_outputs_config: object, disable_any_whitespace: bool | None
) -> SchemaDefaults:
    """Return the settings for schemas, and warn about settings without effect.

    Args:
        structured_outputs_config: vLLM's ``StructuredOutputsConfig``, or a dict of its fields. The
            backend ``outlines`` sets the whitespace in JSON; other backends have no effect.
        disable_any_whitespace: vLLM's earlier argument for the field of the same name.
    """
    fields = structured_outputs_config
    config = dict(fields if isinstance(fields, Mapping) else getattr(fields, "__dict__", {}))
    whitespace: dict[str, Any] = {}
    if config.get("backend") == "outlines":
        del config["backend"]
        whitespace = {"whitespace_pattern": _OUTLINES_WHITESPACE}
    if config.pop("disable_any_whitespace", False) or disable_any_whitespace:
        whitespace = {"disable_any_whitespace": True}
    closes_objects = bool(config.pop("disable_additional_properties", False))
    for name in ("backend", "disable_fallback", "enable_in_reasoning"):
        if name in config:
            config[f"structured_outputs_{name}"] = config.pop(name)
    unknown = {name: value for name, value in config.items() if value}
    known = ("disable_any_whitespace", "disable_additional_properties")
    settle("LLM", unknown, known, stacklevel=4)
    return SchemaDefaults(whitespace, closes_objects)
