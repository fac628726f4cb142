"""Chooses the runner of a model (text or pooling) from vLLM's arguments or the model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.config import EmbedConfig, Runner, attends_both_ways
from batchinfer.errors import ModelError, NotYetError
from batchinfer.pooling.embedding import Embedder, read_embedding_modules
from batchinfer.pooling.model_folder import find_folder, read_json

_TASKS: Mapping[str, Runner] = {
    "generate": "generate",
    **dict.fromkeys(("embed", "embedding", "encode", "classify", "score"), "pooling"),
}
"""Runner for each value of vLLM's earlier argument ``task``."""
_CLASSIFIER = "ForSequenceClassification"
_RERANKER_KEYS = {"architectures", "classifier_from_token", "is_original_qwen3_reranker"}


def choose_runner(runner: str, task: str | None, model: str, revision: str | None) -> Runner:
    """Return the runner of a model (folder or hub id).

    ``auto`` means ``generate``, unless the model's class has no output head or its attention is
    bidirectional.

    Raises:
        NotYetError: the runner or task is unknown.
        ValueError: runner and task contradict each other.
    """
    task_runner = "auto" if task in (None, "auto") else _TASKS.get(str(task))
    if task_runner is None:
        raise NotYetError(f"LLM(task={task!r})")
    if runner not in ("auto", "generate", "pooling"):
        raise NotYetError(f"LLM(runner={runner!r})")
    if task_runner != "auto" and runner not in ("auto", task_runner):
        raise ValueError(f"task is {task!r} and runner is {runner!r}; leave one of them out")
    chosen = runner if task_runner == "auto" else task_runner
    values = _config_values(model, revision)
    name = _class_of(values)
    if chosen == "auto":
        has_head = not name.endswith(("Model", _CLASSIFIER)) or name.endswith("LMHeadModel")
        chosen = "generate" if has_head and not attends_both_ways(values) else "pooling"
    if chosen != "pooling":
        return "generate"
    is_classifier = name.endswith(_CLASSIFIER)
    return "pooling" if is_classifier or not _embeds_whole_texts(model, revision) else "whole_texts"


def _embeds_whole_texts(model: str, revision: str | None) -> bool:
    """Return True if embeddings need hidden states of tokens other than the last."""
    try:
        modules = read_embedding_modules(model, revision)
    except ModelError:  # raised again when an embedding is requested
        return False
    return Embedder(modules, EmbedConfig()).reads_whole_texts


def class_name(model: str, revision: str | None) -> str:
    """Return the first of ``architectures`` in config.json; "" if the file cannot be read, in which
    case loading the model reports the error."""
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
    """Return the tokens with which a reranker answers no and yes, from vLLM's argument.

    Raises:
        NotYetError: the argument overrides other keys.
        ValueError: the number of tokens is not 2.
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
    """Return the names of calls that this runner does not support, with the reasons."""
    why = 'the model is loaded for pooling and generates no text; give runner="generate"'
    calls = ("generate", "chat", "beam_search") if runner in ("pooling", "whole_texts") else ()
    return dict.fromkeys(calls, why)
