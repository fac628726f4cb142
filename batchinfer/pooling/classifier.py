"""Heads that make labels and scores of a hidden state.

Of a model with a head that classifies (transformers' ``...ForSequenceClassification``,
GenericForSequenceClassification in modeling_layers.py) it is the linear layer ``score``. Of a
reranker that answers yes or no (Qwen3-Reranker) it is those tokens' rows of the output head, as in
vLLM's conversion of it (vllm/model_executor/models/adapters.py) and in sentence-transformers'
``LogitScore`` (sentence_transformers/cross_encoder/modules/logit_score.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.config import ClassifyConfig, attends_both_ways
from batchinfer.errors import ModelError, UsageError
from batchinfer.pooling.activations import sigmoid, softmax
from batchinfer.pooling.embedding_modules import Dense
from batchinfer.pooling.encoder_heads import Layer, encoder_head
from batchinfer.pooling.model_folder import find_folder, read_json
from batchinfer.pooling.tensors import Float32, StoredTensor, find_part, find_tensor

_CONFIG_PATTERNS = ("*.json", "[0-9]*_*/config.json")
_RERANKERS = ("qwen3", "qwen3_moe")
"""Model types of Qwen3-Reranker, whose folders look like those of plain models."""
_CHANGED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
_ST_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_PROBLEMS = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}

TokenId = Callable[[str], int | None]
"""The id of a text that is a single token, else None."""


_ACTIVATIONS: Mapping[str, Callable[[Float32], Float32]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "none": lambda logits: logits,
}


@dataclass(frozen=True, slots=True)
class Classifier:
    """What makes scores of a model's hidden states."""

    labels: tuple[str, ...]
    layers: tuple[Layer, ...]
    """The last gives a score for each label."""
    pooling: tuple[str, ...] = ("lasttoken",)
    """How the hidden state is made of a prompt's."""

    def __call__(self, hidden_state: Float32) -> Float32:
        """A hidden state, float32 [H], to the labels' scores, float32 [L]."""
        values = hidden_state
        for dense in self.layers:
            values = dense(values)
        return values


def read_classifier(
    name: str, revision: str | None, config: ClassifyConfig, token_id: TokenId
) -> Classifier:
    """Read the head of a model (folder or hub id).

    Raises:
        ModelError: it has none, or it cannot be read.
        UsageError: ``config.tokens`` are no tokens of the model.
    """
    folder = find_folder(name, revision, (*_CONFIG_PATTERNS, "*.safetensors"))
    values = _config_values(folder)
    tokens = _head_tokens(folder, values, config)
    if tokens is not None:
        return _of_tokens(folder, values, config, tokens, token_id)
    return _of_labels(folder, values, config)


def reads_whole_texts(name: str, revision: str | None) -> bool:
    """Whether a model (folder or hub id) is one whose tokens see those after them.

    Raises:
        ModelError: it cannot be read.
    """
    return attends_both_ways(_config_values(find_folder(name, revision, _CONFIG_PATTERNS)))


def asks_questions(name: str, revision: str | None, config: ClassifyConfig) -> bool:
    """Whether a model (folder or hub id) is asked of pairs in the words of Qwen3-Reranker; else
    it takes them as its tokenizer joins them.

    Raises:
        ModelError: it cannot be read, has no head, or nothing says how it takes pairs.
    """
    folder = find_folder(name, revision, _CONFIG_PATTERNS)
    values = _config_values(folder)
    tokens = _head_tokens(folder, values, config)
    if tokens is None:
        return False
    if values.get("model_type") not in _RERANKERS or tokens[0] is None:
        raise ModelError(
            f"{folder}: not yet: nothing known here says how this model takes a query and a "
            "document",
            hint="write its template in prompt.template, with both columns, in place of "
            "classify.query_column and document_column",
        )
    return True


def _config_values(folder: Path) -> Mapping[str, Any]:
    values = read_json(folder / "config.json")
    if not isinstance(values, Mapping):
        raise ModelError(f"{folder} is no model folder: it has no config.json")
    return values


def _head_tokens(
    folder: Path, values: Mapping[str, Any], config: ClassifyConfig
) -> Sequence[str | int | None] | None:
    """The tokens whose logits are the labels', by text or id, of a pair the second the label's and
    the first what it is held against, if there is one; None for a model with a head of its own.

    Args:
        values: of its config.json.

    Raises:
        ModelError: nothing says what its labels are.
    """
    if config.tokens is not None:
        if attends_both_ways(values):
            raise ModelError(
                f"{folder}/config.json: classify.tokens needs a model that continues texts, and "
                f"one of the family {values.get('model_type')!r} reads them whole; leave it out"
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
        f"{folder}/config.json: architectures names a {_class_name(values)[:80]!r}, which has no "
        "head that classifies",
        hint="take a model ...ForSequenceClassification, a reranker with classify.query_column and "
        "document_column, or name tokens as labels in classify.tokens",
    )


def _class_name(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _logit_score(folder: Path) -> tuple[int | None, int] | None:
    """Token ids of sentence-transformers' ``LogitScore``: what is held against, and the label."""
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
    """A JSON object, or an empty one in the place of anything else."""
    return value if isinstance(value, Mapping) else {}


def _of_labels(folder: Path, values: Mapping[str, Any], config: ClassifyConfig) -> Classifier:
    if attends_both_ways(values):
        return _of_encoder(folder, values, config)
    stored = find_tensor(folder, "score.weight")
    if stored is None:
        raise ModelError(
            f"{folder}: the weight files have no tensor score.weight, the head that "
            f"{_class_name(values)[:80]} has; fetch the model again"
        )
    _check_width(stored, values)
    weight = stored.read()
    labels = _labels(folder, values, len(weight))
    bias = find_tensor(folder, "score.bias")
    offset = np.zeros(len(weight), np.float32) if bias is None else bias.read()
    if offset.shape != (len(weight),):
        raise ModelError(f"{folder}: score.bias does not belong to score.weight; fetch it again")
    activation = _activation(folder, values, config, len(labels))
    return Classifier(labels, (Dense(weight, offset, activation),))


def _of_encoder(folder: Path, values: Mapping[str, Any], config: ClassifyConfig) -> Classifier:
    pooling, layers, count = encoder_head(
        folder, values, lambda logits: _activation(folder, values, config, len(logits))(logits)
    )
    _activation(folder, values, config, count)  # an unknown one is told of now
    return Classifier(_labels(folder, values, count), layers, pooling)


def _activation(
    folder: Path, values: Mapping[str, Any], config: ClassifyConfig, count: int
) -> Layer:
    """What makes scores of the logits of ``count`` labels."""
    kind: str = config.activation
    if kind == "auto":
        kind = _own_activation(folder, values) or ("sigmoid" if count == 1 else "softmax")
    return _ACTIVATIONS[kind]


def _labels(folder: Path, values: Mapping[str, Any], count: int) -> tuple[str, ...]:
    names = values.get("id2label")
    if not isinstance(names, Mapping):
        return tuple(f"LABEL_{at}" for at in range(count))  # as transformers names them
    ids = [str(at) for at in range(count)]
    if set(names) != set(ids):
        raise ModelError(
            f"{folder}/config.json: id2label has {len(names)} labels and the head {count}; take "
            "both from the same model"
        )
    return tuple(str(names[at]) for at in ids)


def _own_activation(folder: Path, values: Mapping[str, Any]) -> str | None:
    """What a model's files say of its activation."""
    saved = _mapping(read_json(folder / "config_sentence_transformers.json"))
    own = _mapping(values.get("sentence_transformers"))
    named = (
        own.get("activation_fn")
        or values.get("sbert_ce_default_activation_function")
        or saved.get("activation_fn")
    )
    if named is None:
        return _PROBLEMS.get(str(values.get("problem_type")))
    kind = _ST_ACTIVATIONS.get(str(named).rpartition(".")[2])
    if kind is None:
        raise ModelError(
            f"{folder}: not yet: the activation {str(named)[:80]} is not supported by this version",
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
            raise ModelError(f"{folder}/config.json: not yet: labels of changed logits ({key})")
    stored = find_tensor(
        folder, "lm_head.weight", "embed_out.weight", "embed_tokens.weight", "wte.weight"
    )
    if stored is None:
        raise ModelError(f"{folder}: the weight files have no output head and no embeddings")
    is_head = stored.name.endswith(("lm_head.weight", "embed_out.weight"))
    codes = None if is_head else find_part(folder, "lm_head.", "embed_out.")
    if codes is not None:  # embeddings are the head of a model that has no other
        raise ModelError(
            f"{codes.path}: not yet: labels of a head that is stored in fewer bits ({codes.name})"
        )
    _check_width(stored, values)
    places = [_row(stored, token, token_id) for token in tokens]
    known = [place for place in places if place is not None]
    weight, bias = stored.read(known), find_tensor(folder, "lm_head.bias", "embed_out.bias")
    offset = np.zeros(len(weight), np.float32) if bias is None else bias.read(known)
    is_one = config.has_pairs or config.tokens is None  # a reranker's
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
    """Check that a head takes hidden states as wide as the model's."""
    text = _mapping(values.get("text_config")) or values
    width = text.get("hidden_size", text.get("n_embd"))
    if len(stored.shape) != 2 or stored.shape[1] != width:
        shape = " x ".join(map(str, stored.shape))
        raise ModelError(
            f"{stored.path}: {stored.name} is {shape}; by config.json it takes {width} numbers"
        )


def _row(stored: StoredTensor, token: str | int | None, token_id: TokenId) -> int | None:
    """The row of the output head that is a token's; None of no token."""
    found = token_id(token) if isinstance(token, str) else token
    if found is None and token is not None:
        raise UsageError(
            f"classify.tokens: {token!r} is not a single token of the model",
            hint="name tokens that it can answer with, often a word with the blank before it, "
            "as ' yes', or a word's beginning; labels of several words need a model with a head",
        )
    if found is not None and not 0 <= found < stored.shape[0]:
        raise ModelError(f"{stored.path}: {stored.name} has no row {found}, a label's token")
    return found
