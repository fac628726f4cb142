"""Inputs of attention for steps whose sequences share prefixes."""

from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.cases import AttentionCase, AttentionInputs, build_attention


@dataclass(frozen=True)
class SharedCase:
    """A step, and the arguments `order` and `shared_lens` of `plan_decode`."""

    attention: AttentionCase
    order: tuple[int, ...]
    shared_lens: tuple[int, ...]

    def __str__(self) -> str:
        return self.attention.name


def _samples(name: str, rows: int, samples: int, **shape: Any) -> SharedCase:
    """All rows share a prefix of 64 tokens; the samples of a row share a prompt of 192 tokens."""
    count = rows * samples
    lens = tuple((1, 200 + 7 * i % 60) for i in range(count))
    shared = tuple(0 if i == 0 else 192 if i % samples else 64 for i in range(count))
    return SharedCase(AttentionCase(name, lens, **shape), tuple(range(count)), shared)


_LENS = ((1, 300), (1, 130), (7, 200), (1, 129), (0, 140), (1, 400), (1, 1), (1, 300))

# For pieces of 64 tokens
INTERPRETED_SHARED_CASES = (
    SharedCase(AttentionCase("pair", ((1, 129), (1, 200))), (1, 0), (0, 128)),
    SharedCase(
        AttentionCase("chunk_in_between", _LENS, num_heads=2),
        (7, 5, 0, 2, 1, 3, 4, 6),
        (0, 288, 192, 128, 128, 112, 128, 0),
    ),
    _samples("several_tiles", 3, 5, num_heads=20, num_kv_heads=1, key_width=40),
    _samples("one_head_each", 2, 3, num_heads=2, num_kv_heads=2, block_size=32),
    _samples("block_of_1", 2, 2, num_heads=3, num_kv_heads=1, block_size=1, sinks=True),
    _samples("sinks_and_softcap", 2, 4, num_heads=4, softcap=2.0, sinks=True, value_width=40),
    _samples("longer_pieces", 2, 3, num_splits=2),
    _samples("window", 1, 3, sliding_window=300),
)

# For pieces of the normal length, on a GPU
LONG_SHARED_CASES = (
    SharedCase(
        AttentionCase(
            "2048_tokens_12_times_4", tuple((1, 2600 + i % 70) for i in range(48)), 32, 8, 128
        ),
        tuple(range(48)),
        tuple(0 if i == 0 else 2560 if i % 4 else 2048 for i in range(48)),
    ),
    SharedCase(
        AttentionCase("wide", tuple((1, 1500 + i) for i in range(40)), 8, 2, 256, sinks=True),
        tuple(range(40)),
        tuple(0 if i == 0 else 1024 if i % 5 else 512 for i in range(40)),
    ),
)


def build_shared(
    case: SharedCase,
    device: torch.device | str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> AttentionInputs:
    """Make the tensors of a case; sequences that are adjacent in `order` share blocks."""
    inputs = build_attention(case.attention, device, dtype, cache_dtype)
    tables, block_size = inputs.arguments["block_tables"], case.attention.block_size
    for place in range(1, len(case.order)):
        sequence, before = case.order[place], case.order[place - 1]
        num_blocks = case.shared_lens[place] // block_size
        tables[sequence, :num_blocks] = tables[before, :num_blocks]
    inputs.arguments["order"] = torch.tensor(case.order, dtype=torch.int32, device=device)
    inputs.arguments["shared_lens"] = torch.tensor(
        case.shared_lens, dtype=torch.int32, device=device
    )
    return inputs
