"""Options of image processors, in ``prompt.mm_processor_kwargs`` and in the model's folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from batchinfer.errors import ModelError, RowError, UsageError
from batchinfer.text.images.loading import load_image_processor
from batchinfer.text.images.processor import ImageProcessor
from tests.vision_folders import add_processor


def processor(folder: Path, family: str, kwargs: dict[str, Any], **stored: Any) -> ImageProcessor:
    """Write and load an image processor.

    Args:
        stored: options in the folder's preprocessor_config.json.
    """
    ids = add_processor(family, folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | stored))
    token_id = ids["context_image_token" if family == "internvl" else "image_token"]
    return load_image_processor(folder, token_id, kwargs)


@pytest.mark.parametrize(
    ("family", "kwargs", "reason"),
    [
        ("gemma4", {"max_soft_tokens": 3}, "max_soft_tokens"),
        ("qwen2_5_vl", {"size": {"height": -1, "width": -1}}, "shortest_edge"),
        ("llava", {"size": "big"}, "size"),
        ("llava", {"image_mean": [1]}, "image_mean"),
    ],
)
def test_bad_values_are_refused_before_the_first_row(
    family: str, kwargs: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason) as refused:
        processor(tmp_path, family, kwargs)
    assert str(refused.value).endswith("check prompt.mm_processor_kwargs")
    assert "resize the picture" not in str(refused.value)


def test_kwargs_change_the_number_of_tokens(tmp_path: Path) -> None:
    few = {"size": {"shortest_edge": 256, "longest_edge": 1024}}
    plain, small = (processor(tmp_path, "qwen2_5_vl", kwargs) for kwargs in ({}, few))
    assert small.num_tokens((128, 128)) == 4 < plain.num_tokens((128, 128))


def test_without_resizing_only_some_sizes_fit(tmp_path: Path) -> None:
    unresized = processor(tmp_path, "qwen2_5_vl", {"do_resize": False})
    assert unresized.num_tokens((32, 48)) == 6
    with pytest.raises(RowError, match="refuses an image"):
        unresized.num_tokens((30, 48))


@pytest.mark.parametrize(
    ("family", "kwargs", "reason"),
    [
        ("llava", {"nonsense": 1}, "no option 'nonsense'; its options are: crop_size, "),
        ("llava", {"padding": True}, "no option 'padding'"),
        ("qwen2_5_vl", {"max_pixel": 1}, "no option 'max_pixel'; did you mean max_pixels?"),
        ("qwen2_5_vl", {"images_kwargs": {"sizes": 1}}, "no option 'sizes'; did you mean size?"),
        ("mistral3", {"patch": 1}, "no option 'patch'"),
        ("lfm2_vl", {"max_tile": 1}, "no option 'max_tile'; did you mean max_tiles?"),
    ],
)
def test_unknown_options_are_refused(
    family: str, kwargs: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)) as refused:
        processor(tmp_path, family, kwargs)
    assert str(refused.value).startswith("prompt.mm_processor_kwargs: ")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "mistral3"])
def test_options_may_be_grouped(family: str, tmp_path: Path) -> None:
    size = {"size": {"shortest_edge": 256, "longest_edge": 1024}}
    if family == "mistral3":
        size = {"size": {"longest_edge": 32}}
    flat, grouped = (processor(tmp_path, family, kw) for kw in (size, {"images_kwargs": size}))
    plain = processor(tmp_path, family, {})
    big = (60, 60)
    assert flat.replacement(big) == grouped.replacement(big) != plain.replacement(big)


@pytest.mark.parametrize(
    ("family", "one", "obeys_folder"),
    [("internvl", 4, False), ("deepseek_ocr2", 145, False), ("unlimited_ocr", 7, True)],
)
@pytest.mark.parametrize("place", ["folder", "job"])
def test_counts_without_tiles_equal_those_of_the_processor(
    place: str, family: str, one: int, obeys_folder: bool, tmp_path: Path
) -> None:
    """The processors of InternVL and DeepSeek-OCR-2 override their image processor's option."""
    off = {"crop_to_patches": False}
    images = processor(tmp_path, family, {}, **off)
    if place == "job":
        images = processor(tmp_path, family, off)
    whole = images._processor
    rng = np.random.default_rng(0)
    for size in ((31, 31), (64, 48), (90, 400), (300, 300)):
        picture = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
        kwargs = off if place == "job" else {}
        made = whole(images=[picture], text=[whole.image_token], return_tensors="np", **kwargs)
        ids = whole.tokenizer.convert_ids_to_tokens(np.asarray(made["input_ids"])[0].tolist())
        count = images.num_tokens(size)
        assert count == ids.count(images._token), size
        assert images.inputs(picture, count)
    assert (count == one) == (obeys_folder or place == "job")
