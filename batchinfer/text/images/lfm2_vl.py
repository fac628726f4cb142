"""The image processor of LFM2-VL.

transformers' own processor needs torchvision. This processor does the same as
``Lfm2VlImageProcessor`` (models/lfm2_vl/image_processing_lfm2_vl.py).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    PILImageResampling,
    SizeDict,
)
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    get_optimal_tiled_canvas,
)
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    convert_image_to_patches,
    pad_along_first_dim,
)
from transformers.processing_utils import ImagesKwargs

Pixels = npt.NDArray[Any]
"""[channels, height, width]"""


class Lfm2VlImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    downsample_factor: int
    do_image_splitting: bool
    min_tiles: int
    max_tiles: int
    use_thumbnail: bool
    min_image_tokens: int
    max_image_tokens: int
    encoder_patch_size: int
    tile_size: int
    max_pixels_tolerance: float
    return_row_col_info: bool


class Lfm2VlImageProcessorPil(PilBackend):  # type: ignore[misc]
    """Cuts images into patches. A large image becomes tiles and a small view of the whole image."""

    valid_kwargs = Lfm2VlImageProcessorKwargs
    downsample_factor = 2
    do_image_splitting = True
    min_tiles = 2
    max_tiles = 10
    use_thumbnail = True
    min_image_tokens = 64
    max_image_tokens = 256
    encoder_patch_size = 16
    tile_size = 512
    max_pixels_tolerance = 2.0
    do_resize = True
    size = {"height": 512, "width": 512}  # noqa: RUF012 (not used, but required)
    resample = PILImageResampling.BILINEAR
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    return_row_col_info = False
    model_input_names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")

    def _preprocess(
        self,
        images: list[Pixels],
        resample: Any,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: Any,
        image_std: Any,
        return_tensors: Any,
        downsample_factor: int,
        do_image_splitting: bool,
        min_tiles: int,
        max_tiles: int,
        use_thumbnail: bool,
        min_image_tokens: int,
        max_image_tokens: int,
        encoder_patch_size: int,
        tile_size: int,
        max_pixels_tolerance: float,
        **kwargs: Any,
    ) -> BatchFeature:
        unit = encoder_patch_size * downsample_factor
        least, most = min_image_tokens * unit**2, max_image_tokens * unit**2
        splits = do_image_splitting and (min_tiles, max_tiles) != (1, 1)
        longest = max_image_tokens * downsample_factor**2
        if do_image_splitting:
            longest = max(longest, (tile_size // encoder_patch_size) ** 2)
        views, shapes, grids, sizes = list[tuple[Pixels, Pixels]](), [], [], []
        for image in images:
            height, width = image.shape[-2:]
            size = _fitting(height, width, unit, least, most)
            whole = self.resize(image, SizeDict(height=size[0], width=size[1]), resample)
            grid, parts = (1, 1), [whole]
            if splits and _rounded_area(height, width, unit, encoder_patch_size) > (
                most * max_pixels_tolerance
            ):
                grid = get_optimal_tiled_canvas(
                    (height, width), (tile_size, tile_size), min_tiles, max_tiles
                )
                canvas = SizeDict(height=tile_size * grid[1], width=tile_size * grid[0])
                parts = _tiles(self.resize(image, canvas, resample), tile_size)
                parts += [whole] if use_thumbnail and grid != (1, 1) else []
            for part in parts:
                pixels = self.rescale(part, rescale_factor) if do_rescale else part
                if do_normalize:
                    pixels = self.normalize(pixels, image_mean, image_std)
                patches = convert_image_to_patches(pixels, encoder_patch_size)
                views.append(pad_along_first_dim(patches, longest))
                shapes.append([side // encoder_patch_size for side in part.shape[-2:]])
            grids.append(grid)
            sizes.append(size)
        values, masks = map(np.stack, zip(*views, strict=True))
        columns, rows = np.array(grids).T
        data = {
            "pixel_values": values,
            "pixel_attention_mask": masks,
            "spatial_shapes": np.array(shapes),
            "image_rows": rows,
            "image_cols": columns,
            "image_sizes": np.array(sizes),
        }
        return BatchFeature(data, return_tensors)


def _rounded_area(height: int, width: int, unit: int, least: int) -> int:
    """Return the area of an image whose sides are rounded to multiples of ``unit``."""
    sides = (max(least, round(side / unit) * unit) for side in (height, width))
    return math.prod(sides)


def _fitting(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Return the size to which an image is scaled: multiples of ``unit``, with an area from
    ``least`` to ``most``."""
    area = _rounded_area(height, width, unit, unit)
    if area > most:
        shrink = math.sqrt(height * width / most)
        sides = (math.floor(side / shrink / unit) * unit for side in (height, width))
    elif area < least:
        grow = math.sqrt(least / (height * width))
        sides = (math.ceil(side * grow / unit) * unit for side in (height, width))
    else:
        sides = (round(side / unit) * unit for side in (height, width))
    first, second = (max(unit, side) for side in sides)
    return first, second


def _tiles(image: Pixels, size: int) -> list[Pixels]:
    """Cut an image into square tiles, row by row."""
    height, width = image.shape[-2:]
    return [
        image[:, top : top + size, left : left + size]
        for top in range(0, height, size)
        for left in range(0, width, size)
    ]
