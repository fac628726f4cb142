"""The image processor of Unlimited-OCR.

transformers' own processor needs torchvision. This processor does the same as
``UnlimitedOcrImageProcessor`` (models/unlimited_ocr/image_processing_unlimited_ocr.py). Unlike the
processor of DeepSeek-OCR-2, this processor returns the grid of each image's tiles, gives the view
of the whole image the configured size in all cases, and squeezes small views to squares.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import BatchFeature
from transformers.image_utils import SizeDict
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorKwargs,
    DeepseekOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)

Pixels = npt.NDArray[Any]


class UnlimitedOcrImageProcessorKwargs(DeepseekOcr2ImageProcessorKwargs, total=False):  # type: ignore[misc, call-arg]
    maximum_pad_value: int
    """If an image has no tiles, a view of at most this size is squeezed to a square instead of
    padded."""


class UnlimitedOcrImageProcessorPil(DeepseekOcr2ImageProcessorPil):  # type: ignore[misc]
    """Makes a view of each whole image and, if the image is large, its tiles."""

    valid_kwargs = UnlimitedOcrImageProcessorKwargs
    tile_size = 640
    maximum_pad_value = 640
    max_patches = 32
    model_input_names = ("pixel_values", "num_local_patches", "patches_grid")

    def _preprocess(
        self,
        images: list[Pixels],
        size: SizeDict,
        resample: Any,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: Any,
        image_std: Any,
        return_tensors: Any,
        crop_to_patches: bool,
        min_patches: int,
        max_patches: int,
        tile_size: int,
        background_color: list[int],
        maximum_pad_value: int,
        **kwargs: Any,
    ) -> BatchFeature:
        def prepared(pixels: Pixels) -> Pixels:
            if do_rescale:
                pixels = self.rescale(pixels, rescale_factor)
            return self.normalize(pixels, image_mean, image_std) if do_normalize else pixels

        whole, tiles, counts, grids = [], list[Pixels](), [], []
        side = max(size.height, size.width)
        for image in images:
            height, width = image.shape[-2:]
            count, grid = 0, (1, 1)
            if crop_to_patches and max(height, width) > tile_size:
                grid = get_optimal_tiled_canvas(
                    (height, width), (tile_size, tile_size), min_patches, max_patches
                )
                parts = self.crop_image_to_patches(
                    image, min_patches, max_patches, tile_size, resample
                )
                count = len(parts)
                tiles += map(prepared, parts)
            counts.append(count)
            grids.append(list(grid))
            if not crop_to_patches and side <= maximum_pad_value:
                view = self.resize(image, SizeDict(height=side, width=side), resample)
            else:
                scale = side / max(height, width)
                scaled = SizeDict(height=round(height * scale), width=round(width * scale))
                view = self.pad_to_square(self.resize(image, scaled, resample), background_color)
            whole.append(prepared(view))
        data = {"pixel_values": np.stack(whole)}
        if tiles:
            data["pixel_values_local"] = np.stack(tiles)
        lists = {"num_local_patches": counts, "patches_grid": grids}
        return BatchFeature(data | lists, return_tensors, skip_tensor_conversion=[*lists])
