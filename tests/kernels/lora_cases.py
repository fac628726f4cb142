"""Inputs for comparing LoRA kernels with their references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from batchinfer.kernels.lora import num_splits
from tests.kernels.cases import Case


@dataclass(frozen=True)
class LoraCase(Case):
    """A step of ``num_rows`` rows; ``counts`` has the number of rows that use each adapter."""

    counts: tuple[int, ...]
    num_rows: int
    ranks: int
    width: int
    out_width: int
    missing: int = 0
    """Number of adapters, counted from the last, for which the layer has no factors."""


LORA_CASES = (
    LoraCase("one_row", (1,), 1, 1, 8, 8),
    LoraCase("odd", (3, 0, 5, 0), 11, 5, 45, 70),
    LoraCase("more_adapters_than_factors", (2, 3, 4), 12, 8, 32, 16, missing=1),
    LoraCase("none_used", (0, 0), 4, 8, 16, 16),
    LoraCase("more_than_a_tile", (33, 1, 64, 30), 140, 16, 96, 40),
    LoraCase("many_ranks_and_pieces", (7, 20), 30, 150, 2100, 130),
)


def build_lora(
    case: LoraCase, device: torch.device | str, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `lora_shrink` and of `lora_expand`.

    `rows` has padding at its end. Outputs and rows of x that no adapter uses hold NaN.
    """
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    # If no adapter is missing, there are factors for one adapter more than `counts` lists.
    adapters = len(case.counts) - case.missing if case.missing else len(case.counts) + 1
    used = sum(case.counts)
    order = torch.randperm(case.num_rows, generator=generator)
    rows = torch.cat([order[:used], torch.zeros(3, dtype=torch.int64)]).to(device)
    starts = torch.tensor([0, *case.counts]).cumsum(0).to(device, torch.int32)
    x = randn(case.num_rows, case.width + 3)[:, : case.width]
    x[order[used:].to(device)] = float("nan")
    pieces = torch.full(
        (num_splits(case.width), len(rows), case.ranks), float("nan"), device=device
    )
    some = torch.randn(2, len(rows), case.ranks + 2, generator=generator).to(device)
    shrink = {"x": x, "down": randn(adapters, case.ranks, case.width), "lowered": pieces}
    expand = {
        "lowered": some[:, :, : case.ranks],
        "up": randn(adapters, case.out_width, case.ranks),
        "out": randn(case.num_rows, case.out_width + 5)[:, : case.out_width],
    }
    where = {"rows": rows, "starts": starts}
    return shrink | where, expand | where
