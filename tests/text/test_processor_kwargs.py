"""Values of ``prompt.mm_processor_kwargs`` that the model's processor refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ModelError, RowError, UsageError
from batchinfer.text.images.loading import load_image_processor
from batchinfer.text.images.processor import ImageProcessor
from tests.vision_folders import add_processor


def processor(folder: Path, family: str, kwargs: dict[str, Any]) -> ImageProcessor:
    token_id = add_processor(family, folder)["image_token"]
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
