"""Layers may keep KV of different sizes, and some layers keep none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.kv.kv_shapes import KVShape
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.kv_cache import KVCache
from tests.models import tiny_config

SLIDE, FULL = "sliding_attention", "full_attention"
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "sliding_window": 512,
    "layer_types": [*[SLIDE] * 5, FULL] * 2,
    "per_layer_config": {
        "05": {"head_dim": 512, "num_key_value_heads": 1},
        "11": {"head_dim": 512},
    },
}


def layout_of(config: dict[str, Any], max_model_len: int | None = 4096) -> KVLayout:
    return KVLayout.from_config(
        config, block_size=16, dtype="bfloat16", max_model_len=max_model_len
    )


def test_shapes_by_layer() -> None:
    layout = layout_of(GEMMA4)
    assert layout.shape(0) == KVShape(4, 256, 256)
    assert layout.shape(5) == KVShape(1, 512, 512)
    assert layout.shape(11) == KVShape(4, 512, 512)
    elements = 10 * 4 * 512 + 1 * 1024 + 4 * 1024
    assert layout.bytes_per_token == 2 * elements


def test_layers_that_read_another_layers_kv_store_none() -> None:
    layout = layout_of(GEMMA4 | {"num_kv_shared_layers": 5})
    assert [layout.owner(layer) for layer in range(12)] == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 6, 5]
    assert layout.place(11) == layout.place(5)
    assert layout.shape(11) == layout.shape(5)
    assert layout.bytes_per_token == 2 * (6 * 4 * 512 + 1 * 1024)


def test_twice_the_heads_in_windows() -> None:
    layout = layout_of(
        {
            "model_type": "mimo_v2_flash",
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 128,
            "layer_types": [FULL, SLIDE, SLIDE],
        }
    )
    assert [layout.shape(layer).num_kv_heads for layer in range(3)] == [2, 4, 4]


shapes = st.builds(
    KVShape, st.integers(1, 3), st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 8])
)


@given(
    kinds=st.lists(st.sampled_from([SLIDE, FULL]), min_size=1, max_size=8),
    drawn=st.data(),
    layer_major=st.booleans(),
)
def test_layers_do_not_overlap_in_the_pool(
    kinds: list[str], drawn: st.DataObject, layer_major: bool
) -> None:
    """After all layers of a group have written, each layer reads back what it wrote."""
    one_each = [drawn.draw(shapes) for _ in kinds]
    own = {
        str(at): {
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.key_width,
            "v_head_dim": shape.value_width,
        }
        for at, shape in enumerate(one_each)
    }
    config = GEMMA4 | {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "per_layer_config": own,
        "num_kv_shared_layers": 0,
    }
    layout = KVLayout.from_config(config, block_size=4, dtype="float32", max_model_len=4096)
    cache = KVCache(layout, 2, torch.device("cpu"), torch.float32, layer_major=layer_major)
    slots = torch.tensor([1, 6])  # one token in each of the two blocks
    groups = {cache.group(layer) for layer in range(len(kinds))}
    for group in groups:  # a slot of the pool holds the layers of only one group
        members = [layer for layer in range(len(kinds)) if cache.group(layer) == group]
        for layer in members:
            shape = one_each[layer]
            key = torch.full((2, shape.num_kv_heads, shape.key_width), float(layer + 1))
            value = torch.full((2, shape.num_kv_heads, shape.value_width), -float(layer + 1))
            cache.write(layer, key, value, slots)
        for layer in members:
            for block, offset in ((0, 1), (1, 2)):
                key, value = cache.read(layer, block)
                assert (key[:, offset] == layer + 1).all()
                assert (value[:, offset] == -layer - 1).all()
    assert (cache.blocks[cache.null_slot] == 0).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_kv_shared_layers": 5},  # no layer with full attention comes before these 5
        {"num_kv_shared_layers": 9},
        {"num_kv_shared_layers": "2"},
        {"per_layer_config": {"9": {"head_dim": 8}}},
        {"per_layer_config": {"1": {"head_dim": "8"}}},
        {"per_layer_config": [1]},
    ],
    ids=str,
)
def test_impossible_kv_configs_are_named(wrong: dict[str, Any]) -> None:
    config = tiny_config("gemma4_text").to_dict() | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        KVLayout.from_config(config, block_size=16, dtype="float32")
