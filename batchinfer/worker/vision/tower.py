"""Loads transformers' vision tower and projector of a multimodal model."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from batchinfer.errors import ModelError, one_line
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.model.language_model import language_model, saved_class
from batchinfer.worker.model.quiet_transformers import quiet_transformers
from batchinfer.worker.model.weights import check_loaded, loading_errors, read_weights
from batchinfer.worker.vision.attention import vision_attention
from batchinfer.worker.vision.patch_convolution import replace_patch_convolutions

GRID_FAMILIES = frozenset(
    {
        *("glm4v", "glm4v_moe", "glm_ocr", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
        *("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "paddleocr_vl"),
    }
)
"""Families whose language models have multimodal rotary positions."""
FAMILIES = GRID_FAMILIES | {
    *("deepseek_ocr2", "gemma3", "gemma4", "gemma4_unified", "internvl", "lfm2_vl", "llava"),
    *("mistral3", "unlimited_ocr"),
}
"""Families whose images this module supports."""

TILE_FAMILIES = frozenset({"gemma3", "internvl", "llava"})
"""Types of models whose towers read images in tiles of ``vision_config.image_size``."""

ImageInputs = Mapping[str, npt.NDArray[Any]]
_LISTS = frozenset({"num_local_patches", "patches_grid"})
"""Arguments of ``get_image_features`` that must be lists."""


class VisionTower(nn.Module):
    """The part of a multimodal model that turns images into embeddings.

    Args:
        body: transformers' multimodal model without its language model.
    """

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    @torch.inference_mode()
    def forward(self, images: Sequence[ImageInputs]) -> torch.Tensor:
        """Return the embeddings [1 + D, tokens, hidden] of images, one image after another: the
        inputs of the language model, and the features to add to the outputs of its first D layers
        (DeepStack).

        Args:
            images: arguments of ``get_image_features`` for each image. ``can_pack`` must be true
                for the first image with every other image.

        Raises:
            ModelError: the tower refuses the shapes of the arrays.
        """
        parameter = next(self.body.parameters())
        arguments: dict[str, Any] = {}
        for name in images[0]:
            tensor = torch.cat([torch.from_numpy(image[name]) for image in images])
            dtype = parameter.dtype if tensor.is_floating_point() else None
            arguments[name] = tensor.to(parameter.device, dtype)
            if name in _LISTS:
                arguments[name] = tensor.tolist()
        try:
            output = self.body.get_image_features(**arguments, return_dict=True)
        except torch.OutOfMemoryError:  # a RuntimeError whose message may contain "size"
            raise
        except (ValueError, RuntimeError) as error:
            if not any(word in str(error) for word in ("shape", "size")):
                raise
            raise ModelError(
                f"the model's vision tower refuses an image from its processor: {one_line(error)}",
                hint="check prompt.mm_processor_kwargs and the model's preprocessor_config.json",
            ) from error
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return torch.stack([torch.cat([each.flatten(0, -2) for each in level]) for level in levels])


def can_pack(one: ImageInputs, other: ImageInputs) -> bool:
    """Return True if two images have arrays of the same names whose shapes differ only in the first
    dimension."""
    return one.keys() == other.keys() and all(
        one[name].shape[1:] == other[name].shape[1:] for name in one
    )


def load_vision_tower(
    folder: Path,
    config: PreTrainedConfig,
    dtype: str,
    device: torch.device,
    like: LinearKernel | None = None,
) -> VisionTower | None:
    """Load the tower of a model's folder; return None if images of its family are not supported.

    Raises:
        ModelError: tensors of the tower are missing or damaged, or have the wrong shape.
        DeviceError: the tower does not fit into the device's memory.
    """
    if config.model_type not in FAMILIES:
        return None
    wrapper_class = saved_class(config)
    assert wrapper_class is not None
    read = _without_language_model(wrapper_class).from_pretrained
    attention = vision_attention(like) if device.type == "cpu" else "sdpa"
    with loading_errors(folder), quiet_transformers():
        wrapper, report, _ = read_weights(read, folder, config, dtype, attention=attention)
        # The files also have the language model's tensors, which this wrapper does not expect.
        check_loaded(folder, wrapper, {**report, "unexpected_keys": set()})
        replace_patch_convolutions(wrapper.model)
        return VisionTower(wrapper.model).to(device).eval()


def vision_tower_bytes(config: PreTrainedConfig, dtype: str) -> int:
    """Return the size in bytes of the vision tower that ``load_vision_tower`` would load; 0 if
    none."""
    if config.model_type not in FAMILIES:
        return 0
    wrapper_class = saved_class(config)
    assert wrapper_class is not None
    with torch.device("meta"), quiet_transformers():
        wrapper = _without_language_model(wrapper_class)(config)
    count = sum(parameter.numel() for parameter in wrapper.parameters())
    return int(count * getattr(torch, dtype).itemsize)


def attention_size(config: PreTrainedConfig) -> tuple[int, float]:
    """Return the size of a tower's attention: the sum over its layers with full attention of their
    heads times the width of a head, and the most patches to which a patch attends.

    A config with other names for its sizes gives a width of 0. Windowed layers are left out,
    because their windows are short.
    """
    vision = config.vision_config
    layers: int = getattr(vision, "depth", getattr(vision, "num_hidden_layers", 0))
    width: int = getattr(vision, "embed_dim", getattr(vision, "hidden_size", 0))
    if hasattr(vision, "fullatt_block_indexes"):
        layers = len(vision.fullatt_block_indexes)
    most_context = math.inf
    if config.model_type in TILE_FAMILIES:
        (height, breadth), (down, across) = _pair(vision.image_size), _pair(vision.patch_size)
        most_context = (height // down) * (breadth // across)
    return layers * width, most_context


def _pair(size: int | Sequence[int]) -> Sequence[int]:
    return (size, size) if isinstance(size, int) else size


def _without_language_model(wrapper_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass without the language model, its head and the audio tower. The subclass has
    the name and module of ``wrapper_class``, because transformers uses these to look up the rules
    for renaming tensors."""

    class Wrapper(wrapper_class):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            if getattr(config, "audio_config", None) is not None:
                config = copy.copy(config)
                config.audio_config = None
            sam = getattr(config.vision_config, "sam_config", None)
            if sam is not None:  # SAM chooses its attention class by _attn_implementation
                sam._attn_implementation = "sdpa"
            super().__init__(config)
            dropped = language_model(self), self.get_output_embeddings()
            for name, module in [*self.named_modules()]:
                if any(module is each for each in dropped):
                    self.set_submodule(name, nn.Identity())
            # All tied weights belong to dropped modules.
            self.all_tied_weights_keys: dict[str, str] = {}

    Wrapper.__name__ = Wrapper.__qualname__ = wrapper_class.__name__
    Wrapper.__module__ = wrapper_class.__module__
    return Wrapper
