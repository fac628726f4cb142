"""A model of a few layers over the weights of a whole one, with windows that a few tokens leave.

A family's code treats all layers of a kind alike, so the first layers of each kind are enough to
compare it, at a hundredth of the cost.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from batchinfer.worker.model.meta_model import build_on_meta
from batchinfer.worker.model.quantization import is_plain

_FEWEST_LAYERS, _MOST_LAYERS = 2, 8
_SHORT_WINDOW = 7
_SHORT_CHUNK = 8
"""A multiple of the comparison's block size."""
_WINDOW = re.compile(r"\w*window(_size)?")
_MOST_IDS = 4096
"""Tokens of the vocabulary: most of a shallow model's weights would be embeddings."""
_MOST_COPIED_BYTES = 2 << 30
_SHARE_OF_FREE = 0.25


@dataclass(frozen=True)
class ShallowCopy:
    """The first layers of a model, in transformers' own class."""

    model: nn.Module
    windows: Mapping[str, int]
    """Sliding windows of the whole model that are shorter here, by the key of its config."""
    in_float32: bool
    """Whether its weights are copies in float32; else they are the whole model's own."""

    @property
    def window(self) -> int:
        """Its shortest sliding window; 0: it has none."""
        return min((*self.windows.values(), _SHORT_WINDOW)) if self.windows else 0


def shallow_copy(model: PreTrainedModel, max_model_len: int, free_bytes: int) -> ShallowCopy:
    """Copy the first layers of a model as transformers loaded it.

    Args:
        max_model_len: windows of at least this many tokens stay as they are.
        free_bytes: of the device's memory. If a copy in float32, where rounding hides nothing, fits
            a quarter of that and 2 GiB, it is made; else the copy shares the model's weights.

    Raises:
        Exception: any, from the model's own code, if no such model can be built.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    windows = _shorten_windows(text, max_model_len)
    if getattr(text, "attention_chunk_size", None):
        text.attention_chunk_size = _SHORT_CHUNK
    _keep_layers(text, _num_layers(model))
    _cut_vocabulary(text)
    made = build_on_meta(config, attn_implementation="eager", dtype=model.dtype)
    copied_bytes = 4 * sum(tensor.numel() for _, tensor in _tensors(made))
    fits = copied_bytes <= min(_MOST_COPIED_BYTES, _SHARE_OF_FREE * free_bytes)
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    in_float32 = fits and all(map(is_plain, linears))
    _put(made, dict(_tensors(model)), torch.float32 if in_float32 else None)
    return ShallowCopy(made.eval().requires_grad_(False), windows, in_float32)


def _shorten_windows(text: Any, max_model_len: int) -> dict[str, int]:
    windows = {
        key: value
        for key, value in text.to_dict().items()
        if _WINDOW.fullmatch(key) and type(value) is int and 1 < value < max_model_len
    }
    for key, value in windows.items():
        setattr(text, key, min(value, _SHORT_WINDOW))
    return windows


def _keep_layers(text: Any, count: int) -> None:
    """Cut the config to its first layers, and its lists by layer. Every layer type stays, unless
    layers of each type have shapes of their own."""
    whole, values = text.num_hidden_layers, text.to_dict()
    shapes = values.get("per_layer_config") or {}
    types = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    count = min(max(count, len(types)), whole)
    for key, value in values.items():
        if isinstance(value, list) and len(value) == whole:
            setattr(text, key, value[:count])
    if types and not shapes:
        missing = [kind for kind in types if kind not in text.layer_types]
        text.layer_types = [*text.layer_types[: count - len(missing)], *missing]
    if count < whole and getattr(text, "num_kv_shared_layers", 0):
        text.num_kv_shared_layers = 0  # they are the last ones
    text.num_hidden_layers = count
    if shapes:
        kept = {int(layer): own for layer, own in shapes.items() if int(layer) < count}
        text.per_layer_config = kept or None


def _cut_vocabulary(text: Any) -> None:
    text.vocab_size = min(text.vocab_size, _MOST_IDS)
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = None


def _num_layers(model: PreTrainedModel) -> int:
    """The number of first layers that include each kind."""
    whole = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers = next((found for found in lists if len(found) == whole), None)
    kinds = [] if layers is None else [_kind(layer) for layer in layers]
    seen = max((kinds.index(kind) + 1 for kind in kinds), default=whole)
    return min(max(seen, _FEWEST_LAYERS), _MOST_LAYERS)


def _kind(layer: nn.Module) -> list[Any]:
    """Return values that are equal for layers of the same kind."""
    return [
        (
            name,
            type(module),
            sorted(
                (key, value)
                for key, value in vars(module).items()
                if key != "layer_idx" and isinstance(value, bool | int | float | str)
            ),
            [parameter.shape for parameter in module.parameters(recurse=False)],
        )
        for name, module in layer.named_modules()
    ]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _put(made: nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    """Fill a model with the tensors of the same names; tied ones stay tied."""
    cast: dict[int, torch.Tensor] = {}
    for prefix, module in made.named_modules():
        for own in (module._parameters, module._buffers):
            for leaf, shaped in [(leaf, held) for leaf, held in own.items() if held is not None]:
                tensor = tensors[f"{prefix}.{leaf}" if prefix else leaf]
                if tensor.shape != shaped.shape:  # of the whole vocabulary, or of every layer
                    tensor = tensor[tuple(slice(size) for size in shaped.shape)]
                if dtype is not None and tensor.is_floating_point():
                    tensor = cast.setdefault(id(tensor), tensor.to(dtype))
                own[leaf] = nn.Parameter(tensor) if own is module._parameters else tensor
