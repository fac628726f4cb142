"""Decides from a model's config whether images are supported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from batchinfer.worker.vision.tower import FAMILIES, GRID_FAMILIES

BOTH_WAYS_FAMILIES = frozenset({"gemma3"})
"""Families in which adjacent tokens of an image attend to each other in both directions."""


@dataclass(frozen=True)
class ImageSupport:
    """How to process images for a vision-language model."""

    folder: Path
    token_id: int
    """Id of the placeholder token, which an image's embeddings replace."""
    merge_size: int | None = None
    """In models with multimodal rotary positions, an image token covers ``merge_size`` x
    ``merge_size`` patches. None for other models."""
    attends_both_ways: bool = False
    """True if adjacent tokens of an image attend to each other in both directions."""
    patch_size: int | None = None
    """Height and width of a patch in pixels; None if the tower's config does not say."""


def image_support(folder: Path, config: PreTrainedConfig) -> ImageSupport | None:
    """Return the image support of a model; None if it takes only text or its family is
    unsupported."""
    if config.model_type not in FAMILIES:
        return None
    token_id = getattr(config, "image_token_id", None)
    return ImageSupport(
        folder,
        config.image_token_index if token_id is None else token_id,
        config.vision_config.spatial_merge_size if config.model_type in GRID_FAMILIES else None,
        _attends_both_ways(config),
        _patch_size(config.vision_config),
    )


def _attends_both_ways(config: PreTrainedConfig) -> bool:
    asked = getattr(config.get_text_config(), "use_bidirectional_attention", None)
    return config.model_type in BOTH_WAYS_FAMILIES or asked == "vision"  # as in Gemma 4


def _patch_size(config: PreTrainedConfig) -> int | None:
    size = getattr(config, "patch_size", None)
    return size[0] if isinstance(size, list | tuple) else size
