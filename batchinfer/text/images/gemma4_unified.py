"""Cuts images into patches for Gemma 4 12B, without torchvision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "Gemma4UnifiedImageProcessor"
"""The image processor of transformers, which needs torchvision."""


def image_processor(settings: Mapping[str, Any]) -> Any:
    """Return the processor of the other Gemma 4 models, with settings that give the same patches.

    ``Gemma4UnifiedImageProcessor`` merges a square of patches into one patch for each token. The
    processor of the other models returns the same patches if its patches are as large as these
    squares and are not merged (``pooling_kernel_size`` 1).

    Args:
        settings: the settings of ``Gemma4UnifiedImageProcessor``.
    """
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    size = settings.get("patch_size", 16) * settings.get("pooling_kernel_size", 3)
    return Gemma4ImageProcessorPil(**{**settings, "patch_size": size, "pooling_kernel_size": 1})
