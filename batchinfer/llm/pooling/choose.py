"""What a model is loaded for, by vLLM's arguments or by its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.config import EmbedConfig, Runner, attends_both_ways
from batchinfer.errors import ModelError, NotYetError
from batchinfer.pooling.embedding import Embedder
from batchinfer.pooling.embedding_modules import read_embedding_modules
from batchinfer.pooling.model_folder import find_folder, read_json

_TASKS: Mapping[str, Runner] = {
    "generate": "generate",
    "embed": "pooling",
    "embedding": "pooling",
    "encode": "pooling",
    "classify": "pooling",
    "score": "pooling",
}
"""vLLM's earlier argument ``task``."""
_POOLING: tuple[Runner, ...] = ("pooling", "whole_texts")
_HEADLESS = ("Model", "ForSequenceClassification")
_WITH_HEAD = "LMHeadModel"
"""As GPT-2's class with its head ends."""
_RERANKER_KEYS = {"architectures", "classifier_from_token", "is_original_qwen3_reranker"}


def choose_runner(runner: str, task: str | None, model: str, revision: str | None) -> Runner:
    """What a model (folder or hub id) is run for: ``auto`` means text, unless its class by
    config.json writes none, or its tokens see those after them.

    Raises:
        NotYetError: there is no such runner or task.
        ValueError: they contradict each other.
    """
    asked = "auto" if task in (None, "auto") else _TASKS.get(str(task))
    if asked is None:
        raise NotYetError(f"LLM(task={task!r})")
    if runner not in ("auto", "generate", "pooling"):
        raise NotYetError(f"LLM(runner={runner!r})")
    if asked != "auto" and runner not in ("auto", asked):
        raise ValueError(f"task is {task!r} and runner {runner!r}; leave one of them out")
    chosen = runner if asked == "auto" else asked
    if chosen == "auto":
        values = _config_values(model, revision)
        name = _class_of(values)
        headless = name.endswith(_HEADLESS) and not name.endswith(_WITH_HEAD)
        chosen = "pooling" if headless or attends_both_ways(values) else "generate"
    if chosen == "pooling":
        return "whole_texts" if _embeds_whole_texts(model, revision) else "pooling"
    return "generate"


def _embeds_whole_texts(model: str, revision: str | None) -> bool:
    """Whether a model's folder says that embeddings are of more than the last token's state."""
    if class_name(model, revision).endswith("ForSequenceClassification"):
        return False
    try:
        modules = read_embedding_modules(model, revision)
    except ModelError:  # who wants embeddings is told then
        return False
    return Embedder(modules, EmbedConfig()).reads_whole_texts


def class_name(model: str, revision: str | None) -> str:
    """The first of config.json's classes; "" where it cannot be read, as loading will say."""
    return _class_of(_config_values(model, revision))


def _class_of(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _config_values(model: str, revision: str | None) -> Mapping[str, Any]:
    try:
        values = read_json(find_folder(model, revision, ("config.json",)) / "config.json")
    except ModelError:
        return {}
    return values if isinstance(values, Mapping) else {}


def classifier_tokens(hf_overrides: Any) -> tuple[str, ...] | None:
    """The tokens that a reranker answers with, as vLLM is told of them.

    Raises:
        NotYetError: other keys of a config are overridden.
        ValueError: they are no two tokens.
    """
    if not hf_overrides:
        return None
    if not isinstance(hf_overrides, Mapping) or hf_overrides.keys() - _RERANKER_KEYS:
        raise NotYetError("LLM(hf_overrides=...)")
    tokens = tuple(hf_overrides.get("classifier_from_token") or ())
    if len(tokens) != 2 or not all(isinstance(token, str) for token in tokens):
        raise ValueError(
            f"hf_overrides: classifier_from_token is {list(tokens)}; it must be two tokens"
        )
    return tokens


def refused_calls(runner: Runner) -> dict[str, str]:
    """Calls that a model which is run for its hidden states cannot do, and why."""
    why = 'the model is loaded for its hidden states and writes no text; give runner="generate"'
    calls = ("generate", "chat", "beam_search") if runner in _POOLING else ()
    return dict.fromkeys(calls, why)
