"""Recurrent states in pool slots: every piece lies in one slot, and no two pieces overlap."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.kv.state_layout import STATE_BYTES, StatePart, min_slot_bytes, state_layout
from tests.engine.kv.recurrent_configs import gated_delta_config

QWEN3_6_35B: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 40,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
}


def places(part: StatePart, num_layers: int, slot_bytes: int) -> list[tuple[int, int]]:
    """Return (slot, first byte) of every piece of every layer."""
    per_slot, size = part.per_slot(slot_bytes), STATE_BYTES * part.piece_elements
    return [
        (number // per_slot, number % per_slot * size)
        for number in range(num_layers * part.num_pieces)
    ]


@given(
    num_layers=st.integers(1, 6),
    key_heads=st.integers(1, 3),
    heads_per_key=st.integers(1, 3),
    key_width=st.integers(1, 20),
    value_width=st.integers(1, 70),
    conv_width=st.integers(2, 4),
    slot_bytes=st.integers(2_000, 30_000),
)
def test_pieces_fit_into_slots(
    num_layers: int,
    key_heads: int,
    heads_per_key: int,
    key_width: int,
    value_width: int,
    conv_width: int,
    slot_bytes: int,
) -> None:
    text = gated_delta_config(
        num_layers=num_layers,
        key_heads=key_heads,
        value_heads=key_heads * heads_per_key,
        key_width=key_width,
        value_width=value_width,
        conv_width=conv_width,
    )
    slot_bytes = max(slot_bytes, min_slot_bytes(text))
    layout = state_layout(text, slot_bytes)
    assert layout is not None
    taken = set[tuple[int, int]]()
    total = 0
    for part, first in ((layout.matrices, 0), (layout.convolutions, layout.first_conv_slot)):
        size = STATE_BYTES * part.piece_elements
        total += size * part.num_pieces * num_layers
        for slot, start in places(part, num_layers, slot_bytes):
            assert start + size <= slot_bytes
            assert first + slot < layout.num_slots
            taken.add((first + slot, start))
    assert len(taken) == num_layers * (layout.matrices.num_pieces + layout.convolutions.num_pieces)
    heads, channels = key_heads * heads_per_key, layout.shape.num_channels
    expected = heads * key_width * value_width + (conv_width - 1) * channels
    assert total == layout.num_bytes == STATE_BYTES * num_layers * expected


def test_sizes_of_qwen3_6_35b() -> None:
    layout = KVLayout.from_config(QWEN3_6_35B, block_size=16, dtype="bfloat16")
    assert layout.bytes_per_token == 20_480
    assert layout.attention_layers == list(range(3, 40, 4))
    state = layout.state
    assert state is not None
    assert state.num_bytes == 62_914_560 + 30 * 3 * 8192 * STATE_BYTES
    assert layout.slots_per_state * layout.bytes_per_block <= 1.01 * state.num_bytes
    assert layout.slots_for(1000) == 63 + layout.slots_per_state


def test_slots_are_padded_to_hold_pieces_of_state() -> None:
    for kv_cache_dtype in ("auto", "fp8"):
        layout = KVLayout.from_config(
            QWEN3_6_35B | {"head_dim": 8, "num_key_value_heads": 1},
            block_size=1,
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
        )
        assert layout.bytes_per_block >= 128 * 16 * STATE_BYTES
        assert layout.bytes_per_block % STATE_BYTES == 0
        assert layout.elements_per_block % layout.parts_per_slot == 0


def test_a_pool_block_for_huge_heads_is_found_quickly() -> None:
    huge = {"linear_num_key_heads": 2**24, "linear_num_value_heads": 2**24}
    layout = KVLayout.from_config(QWEN3_6_35B | huge, block_size=16, dtype="bfloat16")
    assert layout.state is not None  # a list of all numbers up to 2**32 would take minutes
