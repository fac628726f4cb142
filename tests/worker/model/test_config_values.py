from __future__ import annotations

from typing import Any

import pytest

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.model.config_values import (
    BadValueError,
    check_derived,
    check_values,
    readable,
)
from tests.models import FAMILIES, tiny_config


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be 1 or more"),
        ({"head_dim": 0}, "head_dim is 0; it must be 1 or more"),
        ({"hidden_size": -1}, "hidden_size is -1; it must be 1 or more"),
        ({"n_positions": -512}, "n_positions is -512; it must be 1 or more"),
        ({"max_position_embeddings": 10**15}, "it must be at most 2,147,483,647"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000; it must be at most 2,048"),
        ({"n_routed_experts": 10**8}, "n_routed_experts is 100000000; it must be at most 16,384"),
        ({"moe_intermediate_size": 10**9}, "at most 16,777,216"),
        ({"hidden_size": "32"}, 'hidden_size is "32"; it must be a whole number'),
        ({"hidden_size": True}, "hidden_size is true; it must be a whole number"),
        ({"rope_parameters": "yarn"}, 'rope_parameters is "yarn"; it must be an object'),
        ({"rope_theta": "1e4"}, 'rope_theta is "1e4"; it must be a number'),
        ({"rope_parameters": {"rope_theta": []}}, r"rope_parameters\.rope_theta is \[\]; it must"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": "x"}}},
            r'rope_parameters\.full_attention\.rope_theta is "x"; it must be a number',
        ),
        ({"quantization_config": [4]}, r"quantization_config is \[4\]; it must be an object"),
        ({"layer_types": [["x"]]}, "layer_types is .*; it must be a list of strings"),
        ({"dtype": 5}, "dtype is 5; it must be a string"),
        ({"text_config": {"vocab_size": 0}}, "vocab_size is 0"),
        ({"anything": nested(32)}, "anything is nested more than 32 levels deep"),
    ],
)
def test_impossible_values_are_refused_by_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        check_values(values)


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_of_models_are_fine(family: str) -> None:
    check_values(tiny_config(family).to_dict())


def test_values_of_published_configs_are_accepted() -> None:
    check_values(
        {
            "max_position_embeddings": 10_485_760,
            "vocab_size": 262_144,
            "num_hidden_layers": 126,
            "n_routed_experts": 384,
            "head_dim": None,
            "num_key_value_heads": [8, 4],  # another check refuses lists
            "pad_token_id": -1,
            "rope_theta": 1e11,
            "sliding_window": None,
            "nested": nested(31),
        }
    )


def test_heads_must_be_a_multiple_of_kv_heads() -> None:
    layout = KVLayout(1, 3, 8, 8, block_size=1, element_bytes=4)
    with pytest.raises(BadValueError, match="num_attention_heads is 4; it must be a multiple"):
        check_derived(4, layout, None)


def test_positions_beyond_32_bits_are_refused() -> None:
    layout = KVLayout(1, 2, 8, 8, block_size=1, element_bytes=4)
    check_derived(4, layout, 2**31 - 1)
    with pytest.raises(BadValueError, match=r"rope_parameters\.factor"):
        check_derived(4, layout, 2**31)


def test_readable_text_is_one_short_printable_line() -> None:
    assert readable("a\n  b\x1b[31m\u202e") == "a b?[31m?"
    assert readable("x" * 1000, most=3) == "xxx..."
