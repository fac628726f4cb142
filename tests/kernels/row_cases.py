"""Inputs with odd shapes, for comparing row-wise kernels with their references."""

from dataclasses import dataclass
from typing import Any

import torch

from batchinfer.kernels.fp8 import FP8
from batchinfer.kernels.rotary_pairs import PER_ELEMENT, RotaryPairs
from tests.kernels.cases import Case, transposed


@dataclass(frozen=True)
class RowCase(Case):
    """`num_rows` rows of `width` elements, with `padding` elements between rows."""

    num_rows: int
    width: int
    padding: int = 0
    offset: float = 0.0
    centered: bool = False


ROW_CASES = (
    RowCase("one", 1, 1),
    RowCase("odd_width", 3, 45),
    RowCase("strided", 5, 96, padding=7),
    RowCase("offset", 4, 64, offset=1.0),
    RowCase("wide", 70, 1100, padding=3),
    RowCase("centered", 5, 45, padding=3, centered=True),
    RowCase("no_rows", 0, 32),
)


def build_rms_norm(case: RowCase, device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `rms_norm`; `out` holds NaN."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(case.num_rows, case.width + case.padding, generator=generator)
    weight = torch.randn(case.width, generator=generator)
    return {
        "x": rows.to(device, dtype)[:, : case.width],
        "weight": weight.to(device, dtype),
        "eps": 1e-5,
        "offset": case.offset,
        **({"centered": True} if case.centered else {}),
        "out": torch.full((case.num_rows, case.width), torch.nan, device=device, dtype=dtype),
    }


def build_silu_mul(case: RowCase, device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `silu_mul`; some gates are far from zero."""
    generator = torch.Generator().manual_seed(0)
    rows = 20 * torch.randn(case.num_rows, 2 * case.width + case.padding, generator=generator)
    return {
        "gate_up": rows.to(device, dtype)[:, : 2 * case.width],
        "out": torch.full((case.num_rows, case.width), torch.nan, device=device, dtype=dtype),
    }


@dataclass(frozen=True)
class RotaryCase(Case):
    """A step's tokens; a `rotary_width` of 0 means the whole width of a head."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    width: int
    rotary_width: int = 0
    block_size: int = 16
    norms: bool = False
    offset: float = 0.0
    skips: bool = False
    gated: bool = False
    """Each query head is followed by a gate of its width."""
    pairs: RotaryPairs = PER_ELEMENT
    norms_rows: bool = False
    """The norms span all heads."""

    @property
    def is_for_gpu(self) -> bool:
        """True if the C kernels do not support the case."""
        return self.norms_rows or self.pairs != PER_ELEMENT


ROTARY_CASES = (
    RotaryCase("one", 1, 1, 1, 2, block_size=1),
    RotaryCase("grouped", 7, 6, 2, 64),
    RotaryCase("normed", 9, 4, 4, 128, norms=True),
    RotaryCase("normed_with_offset", 5, 4, 1, 40, norms=True, offset=1.0),
    RotaryCase("partly_rotated", 5, 3, 3, 80, rotary_width=20),
    RotaryCase("skips", 10, 2, 1, 24, block_size=24, skips=True),
    RotaryCase("many", 130, 8, 2, 96, norms=True),
    RotaryCase("gated", 6, 6, 2, 64, rotary_width=16, norms=True, offset=1.0, gated=True),
    RotaryCase("normed_rows", 5, 6, 2, 40, norms=True, norms_rows=True, offset=1.0),
    RotaryCase("normed_rows_partly_rotated", 5, 3, 3, 48, 20, norms=True, norms_rows=True),
    RotaryCase("adjacent", 5, 6, 2, 40, pairs=RotaryPairs(adjacent=True)),
    RotaryCase(
        "adjacent_by_pair",
        5,
        3,
        1,
        48,
        rotary_width=20,
        norms=True,
        pairs=RotaryPairs(adjacent=True, by_pair=True),
    ),
    RotaryCase("halves", 5, 4, 2, 64, pairs=RotaryPairs(by_pair=True, halves=True)),
    RotaryCase(
        "partial_halves",
        5,
        4,
        2,
        64,
        rotary_width=24,
        norms=True,
        pairs=RotaryPairs(by_pair=True, halves=True),
    ),
    RotaryCase("no_tokens", 0, 2, 2, 16),
)


def build_rotary_write(
    case: RotaryCase,
    device: torch.device | str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a pool of NaN, and the arguments of `rotary_write`."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    width, num_kv_heads, block_size = case.width, case.num_kv_heads, case.block_size
    num_slots = case.num_tokens // block_size + 3
    num_angles = (case.rotary_width or width) // (2 if case.pairs.halves else 1)
    angles = 6.28 * torch.rand(case.num_tokens, num_angles, generator=generator)
    pool = torch.full((num_slots, 2, num_kv_heads, block_size, width), torch.nan)
    pool = pool.to(device, cache_dtype or dtype)
    slot_mapping = torch.randperm(num_slots * block_size, generator=generator)[: case.num_tokens]
    if case.skips:
        slot_mapping[::3] = -1
    return pool, {
        "qkv": normal(
            case.num_tokens,
            (case.num_heads * (2 if case.gated else 1) + 2 * num_kv_heads) * width,
        ),
        "cos": angles.cos().to(device, dtype),
        "sin": angles.sin().to(device, dtype),
        "key_cache": pool[:, 0],
        "value_cache": transposed(pool[:, 1]) if cache_dtype == FP8 else pool[:, 1],
        "slot_mapping": slot_mapping.to(device),
        "q_norm": normal(width * (case.num_heads if case.norms_rows else 1))
        if case.norms
        else None,
        "k_norm": normal(width * (num_kv_heads if case.norms_rows else 1)) if case.norms else None,
        "eps": 1e-5,
        "offset": case.offset,
        "query_head_stride": 2 * width if case.gated else 0,
        **({} if case.pairs == PER_ELEMENT else {"pairs": case.pairs}),
    }


def build_row_stats(
    num_rows: int, width: int, device: torch.device | str, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of `row_stats`; logits have -inf and ties, and padding between rows."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(num_rows, width + 3, generator=generator)
    logits[:, 1::5] = float("-inf")
    logits[::2, width // 2 :] = logits[::2, : width + 3 - width // 2].clone()
    statistic = torch.full((num_rows,), torch.nan, device=device)
    return {
        "logits": logits.to(device, dtype)[:, :width],
        "maximum": statistic,
        "max_logprob": statistic.clone(),
        "argmax": torch.full((num_rows,), -1, dtype=torch.int64, device=device),
    }
