"""Image processors that transformers has only for torchvision, compared with related ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
)
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from batchinfer.text.images.lfm2_vl import Lfm2VlImageProcessorPil
from batchinfer.text.images.loading import load_image_processor
from batchinfer.text.images.token_counts import TOKEN_COUNTS
from batchinfer.text.images.unlimited_ocr import UnlimitedOcrImageProcessorPil
from tests.job.images.pictures import picture
from tests.vision_folders import CLASSES, add_processor

SIZES = ((30, 30), (32, 20), (90, 40), (33, 130), (200, 70))


@pytest.mark.parametrize("size", SIZES)
def test_unlimited_ocr_sees_the_tiles_of_deepseek_ocr(size: tuple[int, int]) -> None:
    options: dict[str, Any] = {"tile_size": 32, "size": {"height": 64, "width": 64}}
    own = UnlimitedOcrImageProcessorPil(**options, max_patches=6)
    other = DeepseekOcr2ImageProcessorPil(**options, max_patches=6)
    got, expected = (
        processor(picture(1, *size), return_tensors="np") for processor in (own, other)
    )
    for name in {"pixel_values", "pixel_values_local"} & expected.keys():
        np.testing.assert_array_equal(got[name], expected[name])
    assert got["num_local_patches"] == expected["num_local_patches"].tolist()
    (columns, rows), count = got["patches_grid"][0], got["num_local_patches"][0]
    assert columns * rows == max(count, 1)
    if count:
        assert (columns > rows) == (size[1] > size[0])


def test_unlimited_ocr_squeezes_small_views() -> None:
    page = picture(1, 90, 40)
    small, large = (
        UnlimitedOcrImageProcessorPil(size={"height": side, "width": side}, maximum_pad_value=64)(
            page, crop_to_patches=False, do_normalize=False, return_tensors="np"
        )["pixel_values"][0]
        for side in (64, 96)
    )
    squeezed = np.asarray(page.resize((64, 64), Image.Resampling.BICUBIC)) / 255
    np.testing.assert_allclose(small.transpose(1, 2, 0), squeezed, atol=1e-6)
    assert (np.unique(large[:, :, [0, -1]]) * 255).round().tolist() == [127]


def patches_of(image: Image.Image, longest: int) -> np.ndarray:
    """Return an image's patches [longest, 8 * 8 * 3]."""
    processor = Siglip2ImageProcessorPil(
        patch_size=8,
        max_num_patches=longest,
        do_resize=False,
        image_mean=Lfm2VlImageProcessorPil.image_mean,
        image_std=Lfm2VlImageProcessorPil.image_std,
    )
    patches: np.ndarray = processor(image, return_tensors="np")["pixel_values"][0]
    return patches


@pytest.mark.parametrize(
    ("size", "scaled", "grid"),
    [
        ((40, 40), (32, 32), (1, 1)),  # at most 6 tokens of 16 x 16 pixels
        ((5, 4), (32, 32), (1, 1)),  # at least 2 tokens
        ((20, 60), (16, 64), (1, 1)),
        ((90, 50), (48, 16), (2, 1)),  # more than twice as large as 6 tokens
        ((60, 200), (16, 64), (1, 3)),
    ],
)
def test_lfm2_vl_cuts_large_images_into_tiles(
    size: tuple[int, int], scaled: tuple[int, int], grid: tuple[int, int]
) -> None:
    processor = Lfm2VlImageProcessorPil(
        encoder_patch_size=8, tile_size=32, min_image_tokens=2, max_image_tokens=6, max_tiles=4
    )
    page = picture(1, *size)
    got = processor(page, return_tensors="np")
    assert got["image_sizes"].tolist() == [[*scaled]]
    assert (got["image_rows"][0], got["image_cols"][0]) == grid
    rows, columns = grid
    canvas = page.resize((32 * columns, 32 * rows), Image.Resampling.BILINEAR)
    corners = [(32 * at, 32 * row) for row in range(rows) for at in range(columns)]
    views = [canvas.crop((left, top, left + 32, top + 32)) for left, top in corners]
    if grid == (1, 1):
        views = []
    views.append(page.resize(scaled[::-1], Image.Resampling.BILINEAR))
    expected = [patches_of(view, 24) for view in views]
    np.testing.assert_allclose(got["pixel_values"], expected, atol=1e-6)
    shapes = [[view.height // 8, view.width // 8] for view in views]
    assert got["spatial_shapes"].tolist() == shapes
    lengths = [height * width for height, width in shapes]
    assert got["pixel_attention_mask"].sum(axis=1).tolist() == lengths


@pytest.mark.parametrize("family", [f for f, name in CLASSES.items() if name in TOKEN_COUNTS])
def test_tokens_are_counted_without_pixels(family: str, tmp_path: Path) -> None:
    token_id = add_processor(family, tmp_path)["image_token"]
    processor = load_image_processor(tmp_path, token_id, {})
    for height, width in SIZES:
        inputs, (text,) = processor._processed(picture(0, height, width))
        assert inputs
        assert processor.replacement((height, width)) == text
    assert processor._repeated is not None
