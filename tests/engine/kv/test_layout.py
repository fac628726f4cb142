from __future__ import annotations

from typing import Any

import pytest

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.kv.model_config import max_positions

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
MLA = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
}


def layout(config: dict[str, Any], block_size: int = 16, dtype: str = "float32") -> KVLayout:
    return KVLayout.from_config(config, block_size=block_size, dtype=dtype)


def shape(config: dict[str, Any]) -> tuple[int, int, int, int]:
    found = layout(config)
    return found.num_layers, found.num_kv_heads, found.key_width, found.value_width


def test_bytes_of_a_llama() -> None:
    found = layout(LLAMA)
    assert found.bytes_per_token == 12 * 4 * (64 + 64) * 4
    assert found.bytes_per_block == 16 * found.bytes_per_token
    assert layout(LLAMA, dtype="bfloat16").bytes_per_token * 2 == found.bytes_per_token


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 2), ("float32", 4)])
def test_fp8_takes_a_byte_and_leaves_the_models_elements_as_they_are(
    name: str, dtype: str, times: int
) -> None:
    plain = layout(LLAMA, dtype=dtype)
    found = KVLayout.from_config(LLAMA, block_size=16, dtype=dtype, kv_cache_dtype=name)
    assert plain.bytes_per_block == times * found.bytes_per_block
    assert found.bytes_per_token == found.elements_per_token
    assert found.element_bytes == plain.element_bytes == times


DEEPSEEK_V3 = MLA | {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GLM_4_7_FLASH = DEEPSEEK_V3 | {
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}


@pytest.mark.parametrize(
    ("config", "expanded", "latent"),
    [
        (DEEPSEEK_V3, 4_997_120, 70_272),
        (GLM_4_7_FLASH, 962_560, 54_144),
        ({"model_type": "kimi_k25", "text_config": DEEPSEEK_V3}, 4_997_120, 70_272),
        (DEEPSEEK_V3 | {"model_type": "dots3_note"}, 4_997_120, 4_997_120),  # family not supported
        (LLAMA, 12_288, 12_288),
    ],
)
def test_bytes_of_latents(config: dict[str, Any], expanded: int, latent: int) -> None:
    sizes = [
        KVLayout.from_config(config, block_size=16, dtype="bfloat16", latent=keeps).bytes_per_token
        for keeps in (False, True)
    ]
    assert sizes == [expanded, latent]


def test_blocks_for_rounds_up() -> None:
    assert [layout(LLAMA).blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, (12, 4, 64, 64)),
        (LLAMA | {"head_dim": 128}, (12, 4, 128, 128)),
        (LLAMA | {"head_dim": None}, (12, 4, 64, 64)),
        ({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, (12, 12, 64, 64)),
        ({"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 32}, (3, 4, 8, 8)),
        (
            {
                "model_type": "gpt_bigcode",
                "n_layer": 3,
                "n_head": 4,
                "n_embd": 32,
                "multi_query": True,
            },
            (3, 1, 8, 8),
        ),
        ({"model_type": "gemma3", "text_config": LLAMA}, (12, 4, 64, 64)),
        (MLA, (2, 4, 12, 6)),
    ],
)
def test_names_of_families(config: dict[str, Any], expected: tuple[int, int, int, int]) -> None:
    assert shape(config) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "rwkv"}, "recurrent"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "longcat_flash"}, "attends twice"),
        ({"model_type": "paligemma"}, "attention over the prompt is bidirectional"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"alibi": True}, "ALiBi"),
        ({"num_key_value_heads": [4, 2]}, "differ in the shape"),
        ({"num_attention_heads_per_layer": [4, 2]}, "num_attention_heads_per_layer"),
        ({"index_topk": 64}, "index_topk"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "dynamic"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_refuses_by_name(changes: dict[str, Any], reason: str, nested: bool) -> None:
    config = LLAMA | changes
    family = config["model_type"]
    if nested:
        config = {"model_type": "some_vision", "text_config": config}
        family = "some_vision"
    with pytest.raises(ValueError, match=f"'{family}' cannot be run: .*{reason}"):
        layout(config)


def test_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers"):
        layout({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
    ],
)
def test_max_positions(changes: dict[str, Any], expected: int | None) -> None:
    assert max_positions(LLAMA | changes) == expected
