"""Cuts images into patches for Gemma 4 12B, without torchvision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "Gemma4UnifiedImageProcessor"
"""The image processor of transformers, which needs torchvision."""


def image_processor(settings: Mapping[str, Any]) -> Any:
    """Return an image processor that makes the same patches.

    ``Gemma4UnifiedImageProcessor`` merges a square of patches into one patch for each token. The
    processor of the other Gemma 4 models returns the same patches if its patches have the size of
    such a square and it merges none (``pooling_kernel_size`` 1).

    Args:
        settings: the settings of ``Gemma4UnifiedImageProcessor``.
    """
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    size = settings.get("patch_size", 16) * settings.get("pooling_kernel_size", 3)
    return Gemma4ImageProcessorPil(**{**settings, "patch_size": size, "pooling_kernel_size": 1})
