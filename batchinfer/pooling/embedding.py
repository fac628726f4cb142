"""Computes embeddings from hidden states, as a folder in sentence-transformers' layout describes.

``modules.json`` lists the modules after the transformer: ``1_Pooling/config.json`` selects hidden
states, and ``2_Dense`` contains a linear layer with an activation
(sentence_transformers/models/Pooling.py, Dense.py, Normalize.py). Without ``modules.json`` the
embedding is the hidden state of the last token, or the mean of all tokens if attention is
bidirectional.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.config import EmbedConfig, attends_both_ways, longest_text
from batchinfer.errors import ModelError
from batchinfer.pooling.layers import Dense, Layer, gelu, identity, relu, sigmoid, silu
from batchinfer.pooling.model_folder import find_folder, read_config, read_json
from batchinfer.pooling.read_safetensors import Float32, find_tensor

_PATTERNS = ("*.json", "*_Dense/*.safetensors")
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
"""Supported modules, in the only supported order."""
_POOLING_MODES = {  # vectors are concatenated in this order
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: Mapping[str, Layer] = {
    "GELU": gelu,
    "Identity": identity,
    "ReLU": relu,
    "Sigmoid": sigmoid,
    "SiLU": silu,
    "Tanh": np.tanh,
}


@dataclass(frozen=True, slots=True)
class EmbeddingModules:
    """How a model computes embeddings, according to its folder."""

    hidden_size: int
    pooling: tuple[str, ...] = ("lasttoken",)
    """Modes whose vectors are concatenated."""
    dense: tuple[Dense, ...] = ()
    normalizes: bool = True
    """True if embeddings are scaled to length 1 by default."""
    truncate_dim: int | None = None
    """Default number of leading numbers to keep; None to keep all
    (``config_sentence_transformers.json``)."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prefixes to put before texts, keyed by their names."""
    default_prompt: str | None = None
    """Name of the prompt that sentence-transformers uses by default."""
    max_seq_length: int | None = None
    """Maximum number of tokens of a text (``sentence_bert_config.json``)."""
    attends_both_ways: bool = False
    """True if attention is bidirectional. A bidirectional model computes a text in one step,
    without a KV cache."""
    pools_prompt: bool = True
    """True if the tokens of a named prompt are pooled too (``include_prompt``)."""
    takes_messages: bool = False
    """True if texts are rendered by the chat template (``sentence_bert_config.json``)."""

    @property
    def width(self) -> int:
        return self.dense[-1].width if self.dense else self.hidden_size * len(self.pooling)


@dataclass(frozen=True, slots=True)
class Embedder:
    modules: EmbeddingModules
    config: EmbedConfig

    @property
    def pooling(self) -> tuple[str, ...]:
        """Modes that combine the hidden states of a prompt."""
        method = self.config.pooling
        return self.modules.pooling if method == "auto" else (method,)

    @property
    def reads_whole_texts(self) -> bool:
        """True if one step must compute a whole text, because attention is bidirectional or a
        pooling mode other than ``lasttoken`` is used."""
        return self.modules.attends_both_ways or self.pooling != ("lasttoken",)

    @property
    def width(self) -> int:
        return self.config.dimensions or min(
            self.modules.width, self.modules.truncate_dim or self.modules.width
        )

    @property
    def normalizes(self) -> bool:
        default = self.modules.normalizes
        return default if self.config.normalize is None else self.config.normalize

    def __call__(self, hidden_state: Float32) -> npt.NDArray[Any]:
        """Return the embedding [width] of a hidden state [H]: apply dense layers, truncate,
        normalize."""
        values = hidden_state
        for dense in self.modules.dense:
            values = dense(values)
        values = values[: self.width]
        if self.normalizes:
            length = float(np.linalg.norm(values.astype(np.float64)))
            # The same as torch.nn.functional.normalize.
            values = values / np.float32(max(length, 1e-12))
        return values.astype(self.config.dtype)


def read_embedding_modules(name: str, revision: str | None) -> EmbeddingModules:
    """Read how a model (folder or hub id) computes embeddings.

    Raises:
        ModelError: the folder does not exist, or names an unsupported module.
    """
    folder = find_folder(name, revision, _PATTERNS)
    hidden_size, both_ways = _hidden_size(folder)
    pooling: tuple[str, ...] = ("mean",) if both_ways else ("lasttoken",)
    listed = read_json(folder / "modules.json")
    defaults = _Defaults.read(folder / "config_sentence_transformers.json")
    if listed is None:
        return EmbeddingModules(
            hidden_size,
            pooling,
            truncate_dim=defaults.truncate_dim,
            prompts=defaults.prompts,
            default_prompt=defaults.prompt_name,
            attends_both_ways=both_ways,
        )
    if not (isinstance(listed, list) and all(isinstance(module, Mapping) for module in listed)):
        raise ModelError(f"{folder}/modules.json must be a list with an object for each module")
    dense, width, pools_prompt = list[Dense](), hidden_size, True
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in listed]
    if others := [kind for kind in kinds if kind not in _ORDER]:
        raise ModelError(
            f"{folder}/modules.json: a module {others[0][:80]!r} is not yet supported by this "
            "version"
        )
    for before, after in pairwise(kinds):
        if _ORDER.index(before) > _ORDER.index(after) or before == after == "Pooling":
            raise ModelError(
                f"{folder}/modules.json: a module {after!r} after a "
                f"module {before!r} is not yet supported by this version"
            )
    for kind, module in zip(kinds, listed, strict=True):
        path = folder / str(module.get("path", ""))
        if kind == "Pooling":
            pooling, pools_prompt = _pooling(path / "config.json")
            width = hidden_size * len(pooling)
        elif kind == "Dense":
            dense.append(_dense(path, width))
            width = dense[-1].width
    inputs_file = folder / "sentence_bert_config.json"
    inputs = read_json(inputs_file) or {}
    if not isinstance(inputs, Mapping):
        raise ModelError(f"{inputs_file} must be an object")
    try:
        longest = longest_text(inputs)
    except ValueError as error:
        raise ModelError(f"{inputs_file}: {error}") from None
    return EmbeddingModules(
        hidden_size,
        pooling,
        tuple(dense),
        "Normalize" in kinds,
        defaults.truncate_dim,
        defaults.prompts,
        defaults.prompt_name,
        longest,
        attends_both_ways=both_ways,
        pools_prompt=pools_prompt,
        takes_messages="message" in (inputs.get("modality_config") or {}),
    )


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Content of ``config_sentence_transformers.json``."""

    prompts: Mapping[str, str]
    prompt_name: str | None
    truncate_dim: int | None

    @classmethod
    def read(cls, path: Path) -> _Defaults:
        content = read_json(path)
        values = content if isinstance(content, Mapping) else {}
        prompts = values.get("prompts") or {}
        is_text = isinstance(prompts, Mapping) and all(isinstance(p, str) for p in prompts.values())
        if not is_text:
            raise ModelError(f"{path}: prompts must map names to texts; fetch the model again")
        name = values.get("default_prompt_name")
        if name is not None and name not in prompts:
            raise ModelError(
                f"{path}: default_prompt_name is {str(name)[:80]!r}, which is not a name in prompts"
            )
        truncate_dim = values.get("truncate_dim")
        if truncate_dim is not None and (type(truncate_dim) is not int or truncate_dim < 1):
            raise ModelError(
                f"{path}: truncate_dim is {str(truncate_dim)[:80]!r}; it must be a number of "
                "dimensions, 1 or more"
            )
        return cls(dict(prompts), name, truncate_dim)


def _hidden_size(folder: Path) -> tuple[int, bool]:
    """Return the width of hidden states, and True if attention is bidirectional."""
    config = read_config(folder)
    text = config.get("text_config") or config
    size = text.get("hidden_size", text.get("n_embd", text.get("dim")))
    if type(size) is not int or size < 1:
        raise ModelError(f"{folder}/config.json has no hidden_size, which task: embed needs")
    return size, attends_both_ways(config)


def _pooling(path: Path) -> tuple[tuple[str, ...], bool]:
    """Return the modes, and True if the tokens of a named prompt are pooled."""
    config = read_json(path)
    if not isinstance(config, Mapping):
        raise ModelError(f"{path} is missing, but modules.json names it; fetch the model again")
    modes = [name for key, name in _POOLING_MODES.items() if config.get(key)]
    unknown = [
        key
        for key, value in config.items()
        if key.startswith("pooling_mode_") and value is True and key not in _POOLING_MODES
    ]
    named = config.get("pooling_mode")
    if named:
        modes = [named] if isinstance(named, str) else list(named)
    unknown += [str(mode) for mode in modes if mode not in _POOLING_MODES.values()]
    if unknown or not modes:
        methods = ", ".join(dict.fromkeys(unknown)) or "none"
        raise ModelError(f"{path}: pooling by {methods} is not yet supported by this version")
    return tuple(map(str, modes)), config.get("include_prompt") is not False


def _dense(path: Path, width: int) -> Dense:
    config, weights = read_json(path / "config.json"), path / "model.safetensors"
    if not isinstance(config, Mapping) or not weights.is_file():
        raise ModelError(
            f"{path} must contain config.json and model.safetensors of a Dense layer "
            "that modules.json lists, because the embeddings would be wrong "
            "without this layer; fetch the model again"
        )
    taken = config.get("module_input_name", "sentence_embedding")
    if taken != "sentence_embedding" or config.get("use_residual"):
        what = "use_residual" if config.get("use_residual") else f"module_input_name: {taken}"
        raise ModelError(
            f"{path}/config.json: a Dense layer with {str(what)[:80]} is not yet supported by "
            "this version"
        )
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = _ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None:
        raise ModelError(
            f"{path}/config.json: activation_function {name[:80]} is not yet supported by "
            "this version"
        )
    stored, stored_bias = find_tensor(path, "linear.weight"), find_tensor(path, "linear.bias")
    if stored is None:
        raise ModelError(f"{weights} has no tensor linear.weight; fetch the model again")
    weight = stored.read()
    if weight.ndim != 2 or weight.shape[1] != width:
        shape = " x ".join(map(str, weight.shape))
        raise ModelError(f"{weights}: linear.weight is {shape}; its second size must be {width}")
    bias = np.zeros(len(weight), np.float32) if stored_bias is None else stored_bias.read()
    return Dense(weight, bias, activation)
