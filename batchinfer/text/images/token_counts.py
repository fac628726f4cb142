"""Counts the tokens of images for processors that cannot count them without pixels.

``ImageProcessor`` checks each count with images of several sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Size = tuple[int, int]
"""Height and width of an image, in pixels."""


def _of_tiles(processor: Any, size: Size, kwargs: Mapping[str, Any]) -> int:
    """Count the tokens of DeepSeek-OCR-2 and Unlimited-OCR, which see a large image both as a whole
    and in tiles."""
    from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
        get_optimal_tiled_canvas,
    )

    def setting(name: str) -> Any:
        value = kwargs.get(name)
        return getattr(processor.image_processor, name) if value is None else value

    tile, grid, num_tiles = setting("tile_size"), (1, 1), 0
    if setting("crop_to_patches") and max(size) > tile:
        grid = get_optimal_tiled_canvas(
            size, (tile, tile), setting("min_patches"), setting("max_patches")
        )
        num_tiles = grid[0] * grid[1]
    inputs = {"num_local_patches": [num_tiles], "patches_grid": [grid]}
    text: str = processor.replace_image_token(inputs, 0, **kwargs)
    return text.count(processor.image_token)


def _of_patches(processor: Any, size: Size, kwargs: Mapping[str, Any]) -> int:
    """Count the tokens of PaddleOCR-VL, which merges adjacent patches."""
    images = processor.image_processor
    num_patches = images.get_number_of_image_patches(*size, dict(kwargs))
    return int(num_patches // images.merge_size**2)


TOKEN_COUNTS: Mapping[str, Callable[[Any, Size, Mapping[str, Any]], int]] = {
    "DeepseekOcr2Processor": _of_tiles,
    "PaddleOCRVLProcessor": _of_patches,
    "UnlimitedOcrProcessor": _of_tiles,
}
"""Functions that return the number of an image's tokens, keyed by the processor's class."""
