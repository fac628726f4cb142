"""Where a test of a Triton kernel runs, and in which dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

INTERPRETED = (torch.float32, torch.float16)  # Triton's interpreter is wrong in bfloat16
COMPILED = (torch.bfloat16, torch.float16, torch.float32)


def on_both(
    interpreted: Sequence[torch.dtype] = INTERPRETED, compiled: Sequence[torch.dtype] = COMPILED
) -> pytest.MarkDecorator:
    """Run a test of `device` and `dtype` in the interpreter, and under the marker `gpu`."""
    places = [
        *(pytest.param("interpreter", dtype, id=f"{dtype}") for dtype in interpreted),
        *(
            pytest.param("gpu", dtype, id=f"gpu-{dtype}", marks=pytest.mark.gpu)
            for dtype in compiled
        ),
    ]
    return pytest.mark.parametrize(("device", "dtype"), places, indirect=["device"])
