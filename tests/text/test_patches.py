"""Patches that a vision tower reads, as ``plan`` counts them from a trial picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.text.images.loading import load_image_processor
from tests.vision_folders import add_processor


@pytest.mark.parametrize(
    ("family", "patch_size", "expected"),
    [
        ("llava", 8, 1.0),  # one token for each patch
        ("gemma3", 4, 16.0),  # 32 x 32 pixels become 4 tokens
        ("qwen2_5_vl", 8, 4.0),  # 2 x 2 patches become a token
        ("gemma4", 4, None),  # patches are padded to a fixed number
    ],
)
def test_patches_per_token(
    family: str, patch_size: int, expected: float | None, tmp_path: Path
) -> None:
    token_id = add_processor(family, tmp_path)["image_token"]
    found = load_image_processor(tmp_path, token_id, {}).patches_per_token(patch_size)
    assert found == expected or (expected is None and found >= 4)
