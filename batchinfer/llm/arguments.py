"""Checks the arguments that an ``LLM`` is made from."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from batchinfer.config import QUANTIZATIONS, EngineConfig, ModelConfig, Runner, field_names
from batchinfer.config.structured_params import closed_schema
from batchinfer.console.format import did_you_mean
from batchinfer.errors import NotYetError
from batchinfer.llm.compatibility import settle
from batchinfer.text.reasoning.formats import PARSERS, checked_reasoning

FIT = -1
"""``max_model_len``: as long as the pool has room for."""
ARGUMENTS = (
    "adapters",
    "dtype",
    "max_logprobs",
    "max_model_len",
    "quantization",
    "seed",
    "tokenizer",
)
"""Arguments of an ``LLM`` beside those of the engine, for messages."""
_ENGINE_ALIASES: Mapping[str, str] = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_kv_blocks",
}
_NUMBER: tuple[Any, str] = (Integral | None, "a whole number or None")
_YES_OR_NO: tuple[Any, str] = (bool, "True or False")
_KINDS: Mapping[str, tuple[Any, str]] = {
    "max_logprobs": _NUMBER,
    "seed": _NUMBER,
    "skip_tokenizer_init": _YES_OR_NO,
    "enable_lora": _YES_OR_NO,
    "generation_config": (str | os.PathLike, "a text"),
    "override_generation_config": (Mapping | None, "a dict or None"),
}
"""What arguments may be that no record of settings checks."""
_WHITESPACE = ("disable_any_whitespace", "whitespace_pattern")
_OUTLINES = "outlines"
_OUTLINES_WHITESPACE = "[ ]?"
"""What outlines, a backend of vLLM's, puts between the parts of JSON
(``outlines_core.json_schema.WHITESPACE``)."""
_SCHEMA_DEFAULTS = ("disable_any_whitespace", "disable_additional_properties")
_OF_CONFIG: Mapping[str, str] = {
    name: f"structured_outputs_{name}"
    for name in ("backend", "disable_fallback", "enable_in_reasoning")
}
_DTYPES: Mapping[str, str] = {"half": "float16", "float": "float32"}
"""vLLM's other names."""


def model_config(
    model: Any,
    *,
    tokenizer: Any,
    revision: Any,
    dtype: Any,
    max_model_len: Any,
    quantization: Any,
    adapters: Any,
    runner: Runner = "generate",
) -> ModelConfig:
    """The model's configuration, from arguments that may be paths.

    Raises:
        NotYetError: there is no such quantization.
        TypeError: naming the argument, when it is of another type.
        ValueError: ``max_model_len`` is not positive.
    """
    name = model_name(model)
    if max_model_len == FIT:
        max_model_len = None
    dtype = _DTYPES.get(str(dtype), str(dtype).removeprefix("torch."))
    if isinstance(adapters, Mapping):
        adapters = {adapter: _as_text(path) for adapter, path in adapters.items()}
    config = ModelConfig(
        *(name, revision, _as_text(tokenizer), dtype, max_model_len, quantization, adapters, runner)
    )
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise NotYetError(f"LLM(quantization={quantization!r})")
    return config


def model_name(model: object) -> str:
    """The hub id or folder that names a model.

    Raises:
        TypeError: it is none.
    """
    name = _as_text(model)
    if not isinstance(name, str):
        raise TypeError(f"model is {reprlib.repr(name)}; it must be a text")
    return name


def check_arguments(given: Mapping[str, Any]) -> None:
    """Check arguments of an ``LLM`` that no record of settings checks.

    Raises:
        TypeError: naming the argument, when it is of another type.
        ValueError: ``max_logprobs`` is below -1.
    """
    for name, value in given.items():
        kinds, what = _KINDS[name]
        is_bool = isinstance(value, bool)
        if not isinstance(value, kinds) or (is_bool and kinds is not bool):
            raise TypeError(f"{name} is {reprlib.repr(value)}; it must be {what}")
    most = given["max_logprobs"]
    if most is not None and most < -1:
        raise ValueError(f"max_logprobs is {most}; it must be 0 or more, or -1 for any number")


def _as_text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def engine_config(keys: Mapping[str, Any]) -> EngineConfig:
    """The engine's configuration, from arguments that may be unknown or not built yet.

    Raises:
        NotYetError: job files know the argument, ``LLM`` does not build it.
        TypeError, ValueError: it is unknown, of another type or out of range.
    """
    known = field_names(EngineConfig)
    keys = _with_own_names(keys)
    others = {name: value for name, value in keys.items() if name not in known}
    settle("LLM", others, (*ARGUMENTS, *known), stacklevel=4)
    given = {name: value for name, value in keys.items() if value is not None}
    return EngineConfig(**{name: value for name, value in given.items() if name in known})


def _with_own_names(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with vLLM's other names of the engine's keys turned into these."""
    found = dict(keys)
    for name, own in _ENGINE_ALIASES.items():
        value = found.pop(name, None)
        if value is None:
            continue
        if found.get(own) is not None:
            raise ValueError(f"{name} and {own} mean the same; keep one")
        found[own] = f"{value}B" if own == "kv_cache_memory" else value
    return found


def wants_random_weights(load_format: object) -> bool:
    """Whether ``LLM(load_format=...)`` asks for these; warns of what changes nothing.

    Raises:
        NotYetError: there is no such format.
    """
    if load_format == "dummy":
        return True
    settle("LLM", {"load_format": load_format}, (), stacklevel=4)
    return False


def template_text(template: str | os.PathLike[str] | None) -> str | None:
    """The text of ``LLM(chat_template=...)``, which may name a file.

    Raises:
        TypeError, ValueError: it is neither the text of a template nor a file.
    """
    if template is None:
        return None
    if not isinstance(template, str | os.PathLike):
        raise TypeError(f"chat_template is {reprlib.repr(template)}; give a template or its file")
    text = os.fspath(template)
    if isinstance(template, str) and ("{" in text or "\n" in text):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template: {text} is no file that can be read: {error}") from None


def reasoning_asked(
    reasoning: str | Mapping[str, str], parser: str | None
) -> str | Mapping[str, str]:
    """What ``LLM`` was told of thinking, by either of two arguments.

    Args:
        parser: vLLM's name of a parser; "" is as None.

    Raises:
        ValueError: an argument is not known, or both are given.
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
    """What holds for the schemas of all calls that say nothing of it."""

    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str | None = None

    def of(self, structure: Mapping[str, Any]) -> Mapping[str, Any]:
        """``structured_outputs`` of a call with what it leaves open."""
        found = dict(structure)
        if "json" in found and self.disable_additional_properties:
            found["json"] = closed_schema(json.loads(found["json"]))
        is_json = "json" in found or "json_object" in found
        if is_json and self.disable_any_whitespace and not {*_WHITESPACE} & {*found}:
            found["disable_any_whitespace"] = True
        elif is_json and self.whitespace_pattern is not None and not {*_WHITESPACE} & {*found}:
            found["whitespace_pattern"] = self.whitespace_pattern
        return found


def schema_defaults(
    structured_outputs_config: object, disable_any_whitespace: bool | None
) -> SchemaDefaults:
    """What ``LLM`` was told of schemas.

    Args:
        structured_outputs_config: vLLM's ``StructuredOutputsConfig``, or a dict of its fields; all
            but two are without effect, but for the whitespace that the backend ``outlines`` writes.
        disable_any_whitespace: its earlier argument for the same.
    """
    given = structured_outputs_config
    config = dict(given if isinstance(given, Mapping) else getattr(given, "__dict__", {}))
    whitespace = config.pop("disable_any_whitespace", False) or disable_any_whitespace
    properties = config.pop("disable_additional_properties", False)
    pattern = None
    if config.get("backend") == _OUTLINES:
        del config["backend"]
        pattern = _OUTLINES_WHITESPACE
    others = {_OF_CONFIG.get(name, name): value for name, value in config.items() if value}
    settle("LLM", others, _SCHEMA_DEFAULTS, stacklevel=4)
    return SchemaDefaults(bool(whitespace), bool(properties), pattern)
