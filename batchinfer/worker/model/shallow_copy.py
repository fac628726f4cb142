"""Copies the first layers of a model, and shortens their sliding windows to a few tokens.

A family's code treats all layers of a kind alike. Comparing the first layer of each kind with
transformers' layers is therefore enough, and takes a hundredth of the time that a whole model would
take.
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

_MIN_LAYERS, _MAX_LAYERS = 2, 8
_SHORT_WINDOW = 7
_SHORT_CHUNK = 8
"""Length of a shortened chunk, in tokens: a multiple of the block size in ``family_check``."""
_WINDOW = re.compile(r"\w*window(_size)?")
_MAX_VOCAB_SIZE = 4096
"""Largest vocabulary of the copy. With the model's whole vocabulary, most of the copy's weights
would be embeddings."""
_NOT_BY_LAYER = frozenset({"ssm_multipliers"})
"""Lists in configs whose entries do not belong to layers, even if a list has as many entries as the
model has layers."""
_NOT_OF_KIND = frozenset({"layer_idx", "_is_hf_initialized"})
"""Attributes of modules in which layers of a kind may differ. transformers sets
``_is_hf_initialized`` when it loads a module."""
_MAX_COPIED_BYTES = 2 << 30
_SHARE_OF_FREE = 0.25


@dataclass(frozen=True)
class ShallowCopy:
    """The first layers of a model, as an instance of transformers' class."""

    model: nn.Module
    windows: Mapping[str, int]
    """The whole model's sliding windows that the copy shortens, in tokens, keyed by config key."""
    in_float32: bool
    """True if the copy has its own float32 weights, False if it shares the whole model's
    weights."""

    @property
    def window(self) -> int:
        """Shortest sliding window of the copy, in tokens; 0 without windows."""
        return min((*self.windows.values(), _SHORT_WINDOW)) if self.windows else 0


def shallow_copy(model: PreTrainedModel, max_model_len: int, free_bytes: int) -> ShallowCopy:
    """Copy the first layers of a model as transformers loaded it.

    Args:
        max_model_len: longest sequence, in tokens; windows of at least this size are not shortened.
        free_bytes: free memory of the device. If the copy takes at most a quarter of this memory
            and at most 2 GiB, it is in float32, so that rounding does not hide differences. A
            larger copy shares the model's weights.

    Raises:
        Exception: the model's code may raise errors of any type.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    windows = _shorten_windows(text, max_model_len)
    if getattr(text, "attention_chunk_size", None):
        text.attention_chunk_size = _SHORT_CHUNK
    _keep_layers(text, num_copied_layers(model))
    _cut_vocabulary(text)
    shallow = build_on_meta(config, attn_implementation="eager", dtype=model.dtype)
    copied_bytes = 4 * sum(tensor.numel() for _, tensor in _tensors(shallow))
    fits = copied_bytes <= min(_MAX_COPIED_BYTES, _SHARE_OF_FREE * free_bytes)
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    in_float32 = fits and all(map(is_plain, linears))
    _fill(shallow, dict(_tensors(model)), torch.float32 if in_float32 else None)
    return ShallowCopy(shallow.eval().requires_grad_(False), windows, in_float32)


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
    """Limit the config, and the config's lists with an entry for each layer, to the first ``count``
    layers. Keep a layer of every type, unless layers differ in shape."""
    num_layers, values = text.num_hidden_layers, text.to_dict()
    shapes = values.get("per_layer_config") or {}
    types = _layer_types(text, values)
    for key, value in values.items():
        by_layer = isinstance(value, list) and len(value) == num_layers
        if by_layer and key not in _NOT_BY_LAYER:
            setattr(text, key, value[:count])
    if types and not shapes:
        missing = [kind for kind in types if kind not in text.layer_types]
        text.layer_types = [*text.layer_types[: count - len(missing)], *missing]
    if count < num_layers and getattr(text, "num_kv_shared_layers", 0):
        text.num_kv_shared_layers = 0  # only the last layers share KV, and the copy lacks them
    text.num_hidden_layers = count
    if shapes:
        kept = {int(layer): shape for layer, shape in shapes.items() if int(layer) < count}
        text.per_layer_config = kept or None


def _cut_vocabulary(text: Any) -> None:
    text.vocab_size = min(text.vocab_size, _MAX_VOCAB_SIZE)
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = None


def _layer_types(text: Any, values: Mapping[str, Any]) -> list[str]:
    # Some families do not list their layer types, but derive the types from other keys.
    listed = {"layer_types", "layers_block_type"} & values.keys()
    return list(dict.fromkeys(text.layer_types or ())) if listed else []


def num_copied_layers(model: PreTrainedModel) -> int:
    """Return how many of the first layers ``shallow_copy`` copies. The copied layers include each
    kind.

    Beyond ``_MAX_LAYERS``, a layer is included only if no earlier layer has modules of the same
    classes. In Bamba, for example, layer 9 is the first attention layer.
    """
    text: Any = model.config.get_text_config()
    num_layers: int = text.num_hidden_layers
    num_types = len(_layer_types(text, text.to_dict()))
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers = next((values for values in lists if len(values) == num_layers), None)
    if layers is None:
        return min(max(_MAX_LAYERS, num_types), num_layers)
    kinds = [_kind(layer) for layer in layers]
    classes = [{type(module) for module in layer.modules()} for layer in layers]
    seen = max(kinds.index(kind) + 1 for kind in kinds)
    least = max(classes.index(found) + 1 for found in classes)
    return min(max(min(seen, _MAX_LAYERS), least, _MIN_LAYERS, num_types), num_layers)


def _kind(layer: nn.Module) -> list[Any]:
    return [
        (
            name,
            type(module),
            sorted(
                (key, value)
                for key, value in vars(module).items()
                if key not in _NOT_OF_KIND and isinstance(value, bool | int | float | str)
            ),
            [parameter.shape for parameter in module.parameters(recurse=False)],
        )
        for name, module in layer.named_modules()
    ]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _fill(model: nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    """Replace the tensors of a model on the ``meta`` device with ``tensors`` of the same names.
    Tied weights stay tied."""
    cast: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for members in (module._parameters, module._buffers):
            for leaf, shaped in [item for item in members.items() if item[1] is not None]:
                assert shaped is not None
                tensor = tensors[f"{prefix}.{leaf}" if prefix else leaf]
                # The original tensor may have more tokens or layers than the copy.
                if tensor.shape != shaped.shape:
                    tensor = tensor[tuple(slice(size) for size in shaped.shape)]
                if dtype is not None and tensor.is_floating_point():
                    tensor = cast.setdefault(id(tensor), tensor.to(dtype))
                members[leaf] = nn.Parameter(tensor) if members is module._parameters else tensor
