"""Heads that classify, of encoders: layers over the first token's hidden state, or the mean.

As transformers' ``...ForSequenceClassification`` has them: BERT's and NomicBERT's pooler and linear
layer, RoBERTa's, MPNet's and ELECTRA's two linear layers, DistilBERT's, ModernBERT's with a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.errors import ModelError
from batchinfer.pooling.activations import gelu, relu
from batchinfer.pooling.embedding_modules import Dense
from batchinfer.pooling.tensors import Float32, find_tensor

Layer = Callable[[Float32], Float32]
_ROBERTA = ("roberta", "xlm-roberta", "camembert", "mpnet")
HEADED_FAMILIES = ("bert", *_ROBERTA, "electra", "distilbert", "modernbert")
"""Values of ``model_type`` of encoders whose heads are run."""


def encoder_head(
    folder: Path, values: Mapping[str, Any], activation: Callable[[Float32], Float32]
) -> tuple[tuple[str, ...], tuple[Layer, ...], int]:
    """How hidden states are pooled, the layers behind, and how many scores they give.

    Args:
        values: of the model's config.json.
        activation: of the scores.

    Raises:
        ModelError: a layer is missing, or heads of the family are not built.
    """
    family = values.get("model_type")
    if family == "bert":
        hidden: list[Layer] = [_dense(folder, "pooler.dense", np.tanh)]
        last = _dense(folder, "classifier", activation)
    elif family in _ROBERTA or family == "electra":
        inner = gelu if family == "electra" else np.tanh
        hidden = [_dense(folder, "classifier.dense", inner)]
        last = _dense(folder, "classifier.out_proj", activation)
    elif family == "distilbert":
        hidden = [_dense(folder, "pre_classifier", relu)]
        last = _dense(folder, "classifier", activation)
    elif family == "modernbert" and values.get("classifier_activation", "gelu") == "gelu":
        eps = float(values.get("norm_eps", 1e-5))
        hidden = [_dense(folder, "head.dense", gelu), _norm(folder, "head.norm", eps)]
        last = _dense(folder, "classifier", activation)
    else:
        raise ModelError(
            f"{folder}/config.json: not yet: heads that classify of the family {family!r}, which "
            "attends both ways"
        )
    mode = values.get("classifier_pooling", "cls") if family == "modernbert" else "cls"
    return (str(mode),), (*hidden, last), last.width


def _dense(folder: Path, name: str, activation: Callable[[Float32], Float32]) -> Dense:
    weight, bias = find_tensor(folder, f"{name}.weight"), find_tensor(folder, f"{name}.bias")
    if weight is None:
        raise ModelError(
            f"{folder}: the weight files have no tensor {name}.weight, of the head that "
            "classifies; fetch the model again"
        )
    matrix = weight.read()
    offset = np.zeros(len(matrix), np.float32) if bias is None else bias.read()
    return Dense(matrix, offset, activation)


def _norm(folder: Path, name: str, eps: float) -> Layer:
    """LayerNorm (Ba et al. 2016, arXiv:1607.06450)."""
    weight, bias = find_tensor(folder, f"{name}.weight"), find_tensor(folder, f"{name}.bias")
    if weight is None:
        raise ModelError(f"{folder}: the weight files have no tensor {name}.weight")
    scale, offset = weight.read(), None if bias is None else bias.read()

    def normed(values: Float32) -> Float32:
        centred = values - values.mean()
        deviation = np.sqrt(np.square(centred).mean() + np.float32(eps))
        result: Float32 = centred / deviation * scale
        if offset is not None:
            result += offset
        return result

    return normed
