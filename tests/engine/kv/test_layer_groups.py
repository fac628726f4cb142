"""Layers are grouped by their windows; group sizes waste little memory."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.engine.kv.layer_groups import layer_groups, most_in_window, num_outside_window
from batchinfer.engine.kv.layout import KVLayout

FULL, SLIDE = "full_attention", "sliding_attention"
GEMMA3 = [SLIDE] * 5 + [FULL]


def grouped(kinds: list[str], window: int = 512, longest: int = 8192) -> list[tuple[int, int]]:
    """Return (window, number of layers) of each group."""
    config = {"sliding_window": window, "layer_types": kinds}
    return [(g.window, len(g.layers)) for g in layer_groups(config, [1] * len(kinds), longest)]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([FULL] * 4, [(0, 4)]),
        ([SLIDE] * 4, [(512, 4)]),
        ([SLIDE, FULL] * 13, [(0, 13), (512, 13)]),  # gemma2 2b
        (GEMMA3 * 8, [(0, 8), *[(512, 8)] * 5]),  # gemma3 12b
        ([*GEMMA3 * 4, SLIDE, SLIDE], [(0, 4), *[(512, 4)] * 5, (512, 2)]),  # gemma3 1b: 2 unused
        ([SLIDE, FULL, SLIDE], [(0, 1), (512, 1), (512, 1)]),
        ([FULL, *[SLIDE] * 29], [(0, 1), *[(512, 5)] * 5, (512, 4)]),  # 5 unused places
    ],
)
def test_groups_of_kinds(kinds: list[str], expected: list[tuple[int, int]]) -> None:
    assert grouped(kinds) == expected


def test_every_layer_has_a_place() -> None:
    config = {"sliding_window": 512, "layer_types": GEMMA3 * 2}
    groups = layer_groups(config, [1] * 12, 8192)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(12))
    layout = KVLayout(12, 2, 8, 8, block_size=16, element_bytes=2, groups=groups)
    assert len({layout.place(layer) for layer in range(12)}) == 12
    assert layout.place(5) == (0, 0)
    assert layout.bytes_per_block == 2 * (16 * 2 * (8 + 8)) * 2
    assert layout.bytes_per_token * 16 == 6 * layout.bytes_per_block


def test_a_window_longer_than_all_sequences_is_ignored() -> None:
    assert grouped([SLIDE, FULL], window=512, longest=512) == [(0, 2)]
    assert grouped([SLIDE, FULL], window=511, longest=512) == [(0, 1), (511, 1)]


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "unheard_of", "sliding_window": 4096}, 0),  # some layers may have no window
    ],
)
def test_families_without_kinds_of_layers(config: dict[str, Any], window: int) -> None:
    assert [group.window for group in layer_groups(config, [1] * 4, 32768)] == [window]


@pytest.mark.parametrize("window", [2, 9, 16, 17])
@pytest.mark.parametrize("num_new", [1, 5, 16])
def test_a_window_covers_the_right_blocks(window: int, num_new: int) -> None:
    """Count blocks position by position; a window has the next token and the tokens before it."""
    most = 0
    for computed in range(200):
        seen = range(max(computed - window + 1, 0), computed + num_new)
        blocks = {position // 4 for position in seen}
        assert num_outside_window(computed, window, 4) == min(blocks)
        most = max(most, len(blocks))
    assert most == most_in_window(window, 4, num_new)


def test_slots_of_a_long_sequence() -> None:
    """131,072 tokens of gemma3 12b: one of six groups has 8,192 blocks, the others have 65 each."""
    groups = layer_groups({"sliding_window": 1024, "layer_types": GEMMA3 * 8}, [1] * 48, 131072)
    layout = KVLayout(48, 8, 256, 256, block_size=16, element_bytes=2, groups=groups)
    assert layout.slots_for(131072) == 8192 + 5 * 65
    assert layout.slots_for(131072, 2048) == 8192 + 5 * 193
