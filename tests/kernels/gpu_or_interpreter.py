"""Decorators that run a test of a Triton kernel in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

INTERPRETED = (torch.float32, torch.float16)  # Triton's interpreter computes bfloat16 wrongly
COMPILED = (torch.bfloat16, torch.float16, torch.float32)

on_both_devices = pytest.mark.parametrize(
    "device", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True
)


def on_both(
    interpreted: Sequence[torch.dtype] = INTERPRETED, compiled: Sequence[torch.dtype] = COMPILED
) -> pytest.MarkDecorator:
    """Parametrize `device` and `dtype`; cases on a GPU have the marker `gpu`."""
    places = [
        *(pytest.param("interpreter", dtype, id=f"{dtype}") for dtype in interpreted),
        *(
            pytest.param("gpu", dtype, id=f"gpu-{dtype}", marks=pytest.mark.gpu)
            for dtype in compiled
        ),
    ]
    return pytest.mark.parametrize(("device", "dtype"), places, indirect=["device"])
