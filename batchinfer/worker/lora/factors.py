"""Factors of an adapter, and the rows that a linear layer's adapters add to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from batchinfer.worker.attention.attention import current_context


class Factors(NamedTuple):
    """One adapter's factors for a slice of a layer's outputs."""

    down: torch.Tensor  # [rank, in], A
    up: torch.Tensor  # [out, rank], B times the adapter's scale
    start: int
    """The slice's first output."""


def rows_of(
    layer: torch.nn.Module, x: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's arguments and its output as matrices, [T, in] and [T, out], a row for each token.

    Raises:
        RuntimeError: they are not all the tokens of the step.
    """
    x, out = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
    if len(x) != len(current_context().tensors["positions"]):
        raise RuntimeError(f"a {type(layer).__name__} takes some of a step's rows only")
    return x, out
