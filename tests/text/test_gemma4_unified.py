"""Patches of Gemma 4 12B equal transformers', whose image processor needs torchvision."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from batchinfer.text.images.gemma4_unified import image_processor
from tests.job.images.pictures import picture

MODULE = "models/gemma4_unified/image_processing_gemma4_unified.py"
SETTINGS = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}


def function_without_torchvision(name: str) -> Callable[..., Any]:
    """Return a function of transformers' module, which cannot be imported without torchvision."""
    path = Path(transformers.__file__).parent / MODULE
    module = ast.parse(path.read_text())
    module.body = [one for one in module.body if getattr(one, "name", None) == name]
    names: dict[str, Any] = {"math": math, "torch": torch}
    exec(compile(module, str(path), "exec"), names)
    function: Callable[..., Any] = names[name]
    return function


@pytest.mark.parametrize("size", [(60, 90), (200, 31)])
def test_patches_equal_transformers(size: tuple[int, int]) -> None:
    image = picture(0, *size)
    small = Gemma4ImageProcessorPil(**SETTINGS)(image, return_tensors="pt")
    count = int(small["num_soft_tokens_per_image"][0])
    merged, positions = function_without_torchvision("patches_merge")(
        small["pixel_values"][:, : 9 * count], small["image_position_ids"][:, : 9 * count], count
    )
    got = image_processor(SETTINGS)(image, return_tensors="np")
    assert got["num_soft_tokens_per_image"].tolist() == [count]
    assert got["pixel_values"].shape[1] == SETTINGS["max_soft_tokens"]
    np.testing.assert_array_equal(got["pixel_values"][:, :count], merged.numpy())
    np.testing.assert_array_equal(got["image_position_ids"][:, :count], positions.numpy())
    assert (got["image_position_ids"][:, count:] == -1).all()
