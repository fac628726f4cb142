"""Classification heads, which turn a hidden state into a score for each label.

The head of a classifier (transformers' ``...ForSequenceClassification``,
GenericForSequenceClassification in modeling_layers.py) is the linear layer ``score``; an encoder
has more layers before the logits. A reranker that answers yes or no (Qwen3-Reranker) uses the rows
of these two tokens in the output head, as in vLLM's conversion of the model
(vllm/model_executor/models/adapters.py) and in sentence-transformers' ``LogitScore``
(sentence_transformers/cross_encoder/modules/logit_score.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.config import ClassifyConfig, attends_both_ways
from batchinfer.errors import ModelError, UsageError
from batchinfer.pooling.layers import (
    Dense,
    Layer,
    LayerNorm,
    gelu,
    identity,
    relu,
    sigmoid,
    softmax,
)
from batchinfer.pooling.model_folder import find_folder, read_config, read_json
from batchinfer.pooling.read_safetensors import Float32, StoredTensor, find_tensor, tensors_of

_CONFIG_PATTERNS = ("*.json", "[0-9]*_*/config.json")
_RERANKERS = ("qwen3", "qwen3_moe")
"""Values of ``model_type`` of Qwen3-Reranker. A Qwen3-Reranker's folder looks like the folder of an
ordinary Qwen3 model."""
_CHANGED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
_ACTIVATIONS: Mapping[str, Layer] = {"softmax": softmax, "sigmoid": sigmoid, "none": identity}
_ST_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_PROBLEMS = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_ROBERTA: tuple[str, Layer, str] = ("classifier.dense", np.tanh, "classifier.out_proj")
_ENCODER_HEADS: Mapping[str, tuple[str, Layer, str]] = {
    "bert": ("pooler.dense", np.tanh, "classifier"),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), _ROBERTA),
    "electra": ("classifier.dense", gelu, "classifier.out_proj"),
    "distilbert": ("pre_classifier", relu, "classifier"),
    "modernbert": ("head.dense", gelu, "classifier"),
}
"""Head of each encoder family in transformers' ``...ForSequenceClassification``: a linear layer,
its activation, and the linear layer that computes the logits."""
HEADED_FAMILIES = tuple(_ENCODER_HEADS)
"""Values of ``model_type`` of encoders whose heads are supported."""

TokenId = Callable[[str], int | None]
"""Returns the id of a text that is a single token, else None."""


@dataclass(frozen=True, slots=True)
class Classifier:
    labels: tuple[str, ...]
    layers: tuple[Layer, ...]
    """Layers in order; the last layer returns a score for each label."""
    pooling: tuple[str, ...] = ("lasttoken",)
    """Modes that combine the hidden states of a prompt."""

    def __call__(self, hidden_state: Float32) -> Float32:
        """Return the scores of the labels, float32 [L], for a hidden state, float32 [H]."""
        values = hidden_state
        for layer in self.layers:
            values = layer(values)
        return values


def read_classifier(
    name: str, revision: str | None, config: ClassifyConfig, token_id: TokenId
) -> Classifier:
    """Read the head of a model (folder or hub id).

    Raises:
        ModelError: the model has no head, or the head cannot be read.
        UsageError: ``config.tokens`` are not tokens of the model.
    """
    folder = find_folder(name, revision, (*_CONFIG_PATTERNS, "*.safetensors"))
    values = read_config(folder)
    tokens = _head_tokens(folder, values, config)
    if tokens is not None:
        return _of_tokens(folder, values, config, tokens, token_id)
    return _of_labels(folder, values, config)


def reads_whole_texts(name: str, revision: str | None) -> bool:
    """Return True if attention in a model (folder or hub id) is bidirectional.

    Raises:
        ModelError: the folder cannot be read.
    """
    return attends_both_ways(read_config(find_folder(name, revision, _CONFIG_PATTERNS)))


def asks_questions(name: str, revision: str | None, config: ClassifyConfig) -> bool:
    """Return True if a model (folder or hub id) reads a pair in Qwen3-Reranker's prompt format,
    False if its tokenizer joins the two texts.

    Raises:
        ModelError: the folder cannot be read, has no head, or does not define the format of pairs.
    """
    folder = find_folder(name, revision, _CONFIG_PATTERNS)
    values = read_config(folder)
    tokens = _head_tokens(folder, values, config)
    if tokens is None:
        return False
    if values.get("model_type") not in _RERANKERS or tokens[0] is None:
        raise ModelError(
            f"{folder}: this version does not yet know the prompt format in which the model "
            "expects a query and a document",
            hint="instead of classify.query_column and document_column, write a "
            "prompt.template that uses both columns",
        )
    return True


def _head_tokens(
    folder: Path, values: Mapping[str, Any], config: ClassifyConfig
) -> Sequence[str | int | None] | None:
    """Return the tokens that stand for the labels, as texts or ids; None for a model with a head.

    For a reranker, the entries are the token for "no" (or None) and the token for "yes".

    Raises:
        ModelError: the folder does not define labels.
    """
    if config.tokens is not None:
        if attends_both_ways(values):
            raise ModelError(
                f"{folder}/config.json: classify.tokens needs a model that "
                "generates text, but models of the family "
                f"{values.get('model_type')!r} only encode text; leave out classify.tokens"
            )
        return config.tokens
    if _class_name(values).endswith("ForSequenceClassification"):
        return None
    saved = _logit_score(folder)
    if saved is not None:
        return saved
    if config.has_pairs and values.get("model_type") in _RERANKERS:
        return ("no", "yes")
    raise ModelError(
        f"{folder}/config.json: the model's class (architectures) is "
        f"{_class_name(values)[:80]!r}, which has no classification head",
        hint="use a model of a class ...ForSequenceClassification, use a reranker with "
        "classify.query_column and document_column, or name tokens as labels in "
        "classify.tokens",
    )


def _class_name(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _logit_score(folder: Path) -> tuple[int | None, int] | None:
    """Return the token ids for "no" and "yes" from sentence-transformers' ``LogitScore`` config."""
    modules = read_json(folder / "modules.json")
    for module in map(_mapping, modules if isinstance(modules, list) else ()):
        if str(module.get("type", "")).rpartition(".")[2] == "LogitScore":
            path = folder / str(module.get("path", "")) / "config.json"
            ids = _mapping(read_json(path))
            label, other = ids.get("true_token_id"), ids.get("false_token_id")
            if type(label) is not int or (other is not None and type(other) is not int):
                raise ModelError(
                    f"{path}: true_token_id and false_token_id must be token ids; fetch the model "
                    "again"
                )
            return other, label
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _of_labels(folder: Path, values: Mapping[str, Any], config: ClassifyConfig) -> Classifier:
    layers: list[Layer] = []
    name, mode = "score", "lasttoken"
    if attends_both_ways(values):
        layers, name, mode = _encoder_head(folder, values)
    weight, bias = _weight_and_bias(folder, name, None if layers else values)
    labels = _labels(folder, values, len(weight))
    activation = _activation(folder, values, config, len(labels))
    return Classifier(labels, (*layers, Dense(weight, bias, activation)), (mode,))


def _encoder_head(folder: Path, values: Mapping[str, Any]) -> tuple[list[Layer], str, str]:
    """Return the layers before the logits, the name of the last layer, and the pooling mode."""
    family = str(values.get("model_type"))
    is_modern = family == "modernbert"
    if family not in _ENCODER_HEADS or (
        is_modern and values.get("classifier_activation", "gelu") != "gelu"
    ):
        raise ModelError(
            f"{folder}/config.json: classification heads of the family {family!r}, "
            "whose attention is bidirectional, are not yet supported by this version"
        )
    name, activation, last = _ENCODER_HEADS[family]
    layers: list[Layer] = [Dense(*_weight_and_bias(folder, name), activation)]
    if not is_modern:
        return layers, last, "cls"
    eps = float(values.get("norm_eps", 1e-5))
    layers.append(LayerNorm(*_weight_and_bias(folder, "head.norm"), eps))
    return layers, last, str(values.get("classifier_pooling", "cls"))


def _weight_and_bias(
    folder: Path, name: str, values: Mapping[str, Any] | None = None
) -> tuple[Float32, Float32]:
    """Return weight and bias of a layer; the bias is 0 if the layer has none.

    Args:
        values: content of config.json, to check the layer's input width; None: no check.
    """
    stored, bias = find_tensor(folder, f"{name}.weight"), find_tensor(folder, f"{name}.bias")
    if stored is None:
        raise ModelError(
            f"{folder}: the weight files have no tensor {name}.weight of the "
            "classification head; fetch the model again"
        )
    if values is not None:
        _check_width(stored, values)
    weight = stored.read()
    offset = np.zeros(len(weight), np.float32) if bias is None else bias.read()
    if offset.shape != (len(weight),):
        raise ModelError(
            f"{folder}: {name}.bias does not belong to {name}.weight; fetch the model again"
        )
    return weight, offset


def _activation(
    folder: Path, values: Mapping[str, Any], config: ClassifyConfig, count: int
) -> Layer:
    kind: str = config.activation
    if kind == "auto":
        kind = _own_activation(folder, values) or ("sigmoid" if count == 1 else "softmax")
    return _ACTIVATIONS[kind]


def _labels(folder: Path, values: Mapping[str, Any], count: int) -> tuple[str, ...]:
    names = values.get("id2label")
    if not isinstance(names, Mapping):
        return tuple(f"LABEL_{at}" for at in range(count))  # the same names as in transformers
    ids = [str(at) for at in range(count)]
    if set(names) != set(ids):
        raise ModelError(
            f"{folder}/config.json: id2label has {len(names)} labels, but the "
            f"classification head has {count}; take config.json and the "
            "safetensors files from the same model"
        )
    return tuple(str(names[at]) for at in ids)


def _own_activation(folder: Path, values: Mapping[str, Any]) -> str | None:
    saved = _mapping(read_json(folder / "config_sentence_transformers.json"))
    section = _mapping(values.get("sentence_transformers"))
    named = (
        section.get("activation_fn")
        or values.get("sbert_ce_default_activation_function")
        or saved.get("activation_fn")
    )
    if named is None:
        return _PROBLEMS.get(str(values.get("problem_type")))
    kind = _ST_ACTIVATIONS.get(str(named).rpartition(".")[2])
    if kind is None:
        raise ModelError(
            f"{folder}: the activation {str(named)[:80]} is not yet supported by this version",
            hint="set classify.activation",
        )
    return kind


def _of_tokens(
    folder: Path,
    values: Mapping[str, Any],
    config: ClassifyConfig,
    tokens: Sequence[str | int | None],
    token_id: TokenId,
) -> Classifier:
    for part in (values, _mapping(values.get("text_config"))):
        if key := next((key for key in _CHANGED_LOGITS if part.get(key)), None):
            raise ModelError(
                f"{folder}/config.json: token labels of a model that changes "
                f"its logits ({key}) are not yet supported by this version"
            )
    stored = find_tensor(
        folder, "lm_head.weight", "embed_out.weight", "embed_tokens.weight", "wte.weight"
    )
    if stored is None:
        raise ModelError(f"{folder}: the weight files have no output head and no embeddings")
    is_head = stored.name.endswith(("lm_head.weight", "embed_out.weight"))
    if not is_head:  # the embeddings are the head, unless there is a quantized head
        for one in tensors_of(folder):
            if re.search(r"(^|\.)(lm_head|embed_out)\.", one.name) and not one.name.endswith(
                ".bias"
            ):
                raise ModelError(
                    f"{one.path}: token labels of a model with a quantized "
                    f"output head ({one.name}) are not yet supported by this version"
                )
    _check_width(stored, values)
    places = [_row(stored, token, token_id) for token in tokens]
    known = [place for place in places if place is not None]
    weight, bias = stored.read(known), find_tensor(folder, "lm_head.bias", "embed_out.bias")
    offset = np.zeros(len(weight), np.float32) if bias is None else bias.read(known)
    is_one = config.has_pairs or config.tokens is None  # true for a reranker
    if is_one:
        weight, offset = (rows[-1:] - rows[:-1].sum(0, keepdims=True) for rows in (weight, offset))
    names = [str(token) for token in (tokens[-1:] if is_one else tokens)]
    if is_one and not isinstance(tokens[-1], str):
        names = ["yes"]
    kind: str = config.activation
    if kind == "auto":
        own = _own_activation(folder, {}) if config.tokens is None else None
        kind = own or ("sigmoid" if is_one else "softmax")
    return Classifier(tuple(names), (Dense(weight, offset, _ACTIVATIONS[kind]),))


def _check_width(stored: StoredTensor, values: Mapping[str, Any]) -> None:
    text = _mapping(values.get("text_config")) or values
    width = text.get("hidden_size", text.get("n_embd"))
    if len(stored.shape) != 2 or stored.shape[1] != width:
        shape = " x ".join(map(str, stored.shape))
        raise ModelError(
            f"{stored.path}: {stored.name} is {shape}, but the width in config.json is {width}"
        )


def _row(stored: StoredTensor, token: str | int | None, token_id: TokenId) -> int | None:
    """Return the row of a token in the output head; None if ``token`` is None."""
    id_ = token_id(token) if isinstance(token, str) else token
    if id_ is None and token is not None:
        raise UsageError(
            f"classify.tokens: {token!r} is not a single token of the model",
            hint="name single tokens that the model can answer with, such as a word "
            "with a leading space (' yes') or the start of a word; labels of "
            "several words need a model with a classification head",
        )
    if id_ is not None and not 0 <= id_ < stored.shape[0]:
        raise ModelError(
            f"{stored.path}: {stored.name} has no row for token id {id_}, which stands for a label"
        )
    return id_
