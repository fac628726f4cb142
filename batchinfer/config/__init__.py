"""Settings of sampling, prompts and the engine: frozen dataclasses that validate their values.

``call_params`` holds the parameters of the Python API, with vLLM's names.
"""

from __future__ import annotations

from dataclasses import fields

from batchinfer.config.engine import QUANTIZATIONS, EngineConfig, sized_for
from batchinfer.config.model import (
    ModelConfig,
    Runner,
    attends_both_ways,
    is_encoder,
    longest_text,
    position_offset,
)
from batchinfer.config.prompt import AcceptConfig, PromptConfig
from batchinfer.config.sampling import (
    HUGE,
    MAX_BEAMS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    SAMPLING_ALIASES,
    SamplingParams,
)
from batchinfer.config.settings_base import Record, parse_size
from batchinfer.config.task_settings import (
    EMBEDDING,
    SCORING,
    ClassifyConfig,
    EmbedConfig,
    ScoreConfig,
)

__all__ = [
    "EMBEDDING",
    "HUGE",
    "MAX_BEAMS",
    "MAX_LOGPROBS",
    "MAX_SAMPLES",
    "QUANTIZATIONS",
    "SAMPLING_ALIASES",
    "SCORING",
    "AcceptConfig",
    "ClassifyConfig",
    "EmbedConfig",
    "EngineConfig",
    "ModelConfig",
    "PromptConfig",
    "Runner",
    "SamplingParams",
    "ScoreConfig",
    "attends_both_ways",
    "field_names",
    "is_encoder",
    "longest_text",
    "parse_size",
    "position_offset",
    "sized_for",
]


def field_names(record: type[Record]) -> tuple[str, ...]:
    """Return the names of a record's fields, in order."""
    return tuple(entry.name for entry in fields(record))  # type: ignore[arg-type]
