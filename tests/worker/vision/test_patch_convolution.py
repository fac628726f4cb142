"""Patch embeddings as linear layers equal the convolutions that they replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchinfer.worker.vision.patch_convolution import (
    PatchLinear,
    has_separate_patches,
    replace_patch_convolutions,
)


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(3, 8, 4, stride=4), (2, 3, 12, 8)),
        (nn.Conv2d(3, 8, 4, stride=4, padding="valid", bias=False), (2, 3, 15, 9)),  # 3 x 2 patches
        (nn.Conv2d(3, 8, (2, 5), stride=(2, 5)), (1, 3, 4, 15)),
        (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), (7, 3, 2, 4, 4)),
        (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), (1, 3, 4, 8, 12)),
    ],
    ids=["2d", "remainder", "oblong", "one patch", "3d"],
)
def test_a_linear_layer_computes_the_convolution(
    convolution: nn.Conv2d | nn.Conv3d, shape: tuple[int, ...]
) -> None:
    assert has_separate_patches(convolution)
    images = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(PatchLinear(convolution)(images), convolution(images))


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"stride": 4, "padding": 1},
        {"stride": 4, "groups": 3},
        {"stride": 4, "dilation": 2},
    ],
    ids=str,
)
def test_other_convolutions_are_kept(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 9, 4, **options), nn.Conv1d(9, 9, 2, stride=2))
    assert replace_patch_convolutions(model) == 0


def test_transformers_reads_the_dtype_of_a_replaced_weight() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4)).to(torch.bfloat16)
    assert replace_patch_convolutions(model) == 1
    assert model[0].weight.dtype == torch.bfloat16  # type: ignore[union-attr]
