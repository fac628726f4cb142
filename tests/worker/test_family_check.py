"""Families are refused if paged attention would change transformers' logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PhimoeConfig

from batchinfer.config import ModelConfig
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import ModelError
from batchinfer.worker.attention import attention
from batchinfer.worker.attention.attention import ATTENTION_NAME, register
from batchinfer.worker.family_check import check_against_eager, check_attention
from batchinfer.worker.loader import load_model
from batchinfer.worker.model.shallow_copy import shallow_copy
from tests.models import FAMILIES, tiny_config, tiny_model

LONGEST = 512
FREE = 16 << 30
"""Enough memory for a float32 copy of the model."""


def model_of(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    register()
    model: Any = tiny_model(family, **changes).to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def with_layout(family: str) -> tuple[Any, KVLayout]:
    model = model_of(family)
    return model, KVLayout.from_config(model.config.to_dict(), block_size=1, dtype="float32")


def phimoe(window: int | None) -> Any:
    torch.manual_seed(0)
    values = tiny_config("mixtral").to_dict() | {"sliding_window": window, "model_type": "phimoe"}
    del values["head_dim"]
    return AutoModelForCausalLM.from_config(PhimoeConfig.from_dict(values)).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_can_be_run_pass(family: str) -> None:
    check_attention(*with_layout(family))
    check_against_eager(model_of(family), LONGEST, FREE)
    check_against_eager(model_of(family, torch.bfloat16), LONGEST, free_bytes=0)


def test_layers_with_their_own_attention_are_refused() -> None:
    model, layout = with_layout("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match=r"'llama' cannot be run: .*in order \(layer 2\)"):
        check_attention(model, layout)
    model.model.layers[2].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match=r"its 3 layers .* but 1 calls were made"):
        check_attention(model, layout)


def test_more_attention_layers_than_in_the_config_are_refused() -> None:
    model, layout = with_layout("llama")
    model.model.layers[2].self_attn.layer_idx = 3
    with pytest.raises(ModelError, match="'llama' cannot be run: layer 3 calls attention, but"):
        check_attention(model, layout)


def test_keys_with_another_shape_than_the_configs_are_refused() -> None:
    model, _ = with_layout("llama")
    model.config.num_key_value_heads = 1
    wrong = KVLayout.from_config(model.config.to_dict(), block_size=1, dtype="float32")
    with pytest.raises(ModelError, match="layer 0 has keys and values"):
        check_attention(model, wrong)


def test_a_layer_without_the_window_of_its_config_is_refused() -> None:
    model, layout = with_layout("gemma2")
    model.model.layers[2].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="layer 2 has the type sliding_attention"):
        check_attention(model, layout)


def test_a_model_that_ignores_positions_is_refused() -> None:
    model, layout = with_layout("llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
    check_attention(
        model, layout
    )  # rotary positions are relative, so a constant shift changes nothing
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None] ** 2)
    with pytest.raises(ModelError, match="depends on its neighbors"):
        check_attention(model, layout)


def test_a_model_that_mixes_neighbors_is_refused() -> None:
    model, layout = with_layout("llama")
    embed = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: embed(ids).cumsum(1)
    with pytest.raises(ModelError, match="depends on its neighbors"):
        check_attention(model, layout)


@pytest.mark.parametrize("free_bytes", [0, FREE])
def test_a_sliding_window_in_the_attention_mask_alone_is_refused(free_bytes: int) -> None:
    register()
    with pytest.raises(ModelError, match=r"'phimoe' cannot be run: .*sliding_window .*to 300"):
        check_against_eager(phimoe(300), LONGEST, free_bytes)
    # No sequence is longer than the window.
    check_against_eager(phimoe(LONGEST), LONGEST, free_bytes)
    check_against_eager(phimoe(None), LONGEST, free_bytes)


def test_a_model_with_a_window_in_its_mask_loads_only_below_it(tmp_path: Path) -> None:
    phimoe(9).save_pretrained(tmp_path)
    cpu = torch.device("cpu")
    with pytest.raises(ModelError, match=r"/config.json: .*'phimoe' cannot be.*sliding_window"):
        load_model(ModelConfig(str(tmp_path)), device=cpu)
    assert load_model(ModelConfig(str(tmp_path), max_model_len=9), device=cpu).max_model_len == 9


@pytest.mark.parametrize(
    ("family", "without"),
    [
        ("gemma2", "softcap"),
        ("gpt_oss", "sinks"),
        ("mistral", "sliding_window"),
        ("llama", "scale"),
    ],
)
def test_a_family_is_refused_if_paged_attention_ignores_an_argument(
    family: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = attention.AttentionVariant
    other = {"softcap": 0.0, "sinks": None, "sliding_window": 0, "scale": 1.0}[without]
    monkeypatch.setattr(
        attention, "AttentionVariant", lambda **given: replace(whole(**given), **{without: other})
    )
    with pytest.raises(ModelError, match=rf"'{family}' cannot be run"):
        check_against_eager(model_of(family), LONGEST, FREE)


def test_a_model_of_five_positions_passes() -> None:
    check_against_eager(model_of("gpt2", n_positions=5), 5, FREE)


def test_the_shallow_copy_has_all_kinds_of_layers() -> None:
    types = ["sliding_attention"] * 5 + ["full_attention"]
    model = model_of("gemma3_text", num_hidden_layers=6, layer_types=types)
    made = shallow_copy(model, LONGEST, FREE)
    config: Any = made.model.config
    assert config.layer_types[-1] == "full_attention"
    assert config.num_hidden_layers == len(config.layer_types) <= 6
    assert made.windows == {"sliding_window": 9}
    assert config.sliding_window == made.window == 7
    assert model.config.num_hidden_layers == 6


def test_the_shallow_copy_includes_an_expert_layer_after_dense_ones() -> None:
    made = shallow_copy(model_of("deepseek_v3", first_k_dense_replace=2), LONGEST, FREE)
    config: Any = made.model.config
    assert config.num_hidden_layers == 3


def test_the_shallow_copy_shares_weights_if_memory_is_short() -> None:
    model = model_of("llama")
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    own = shallow_copy(model, LONGEST, FREE)
    shared = shallow_copy(model, LONGEST, free_bytes=100_000)
    held = {tensor.data_ptr() for tensor in model.parameters()}
    assert own.in_float32
    assert not shared.in_float32
    assert all(tensor.data_ptr() in held for tensor in shared.model.parameters())
    check_against_eager(model, LONGEST, FREE)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
def test_the_shallow_copy_leaves_out_layers_that_share_kv(family: str) -> None:
    kinds = [*["sliding_attention"] * 3, "full_attention"] * 3
    wider = {layer: {"head_dim": 16} for layer in (3, 7, 11)}
    changes: dict[str, Any] = {"num_hidden_layers": 12, "layer_types": kinds}
    if family == "gemma4_text":
        changes["per_layer_config"] = wider
    else:
        changes |= {"intermediate_size": [48] * 12, "activation_sparsity_pattern": [0.0] * 12}
    model: Any = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    check_against_eager(model.eval(), 512, 1 << 30)
    made = shallow_copy(model, 512, 1 << 30)
    assert made.model.config.num_hidden_layers < 12
    assert made.model.config.num_kv_shared_layers == 0


def test_the_shallow_copy_has_a_small_vocabulary() -> None:
    model = model_of("llama", vocab_size=5000, pad_token_id=4999)
    made = shallow_copy(model, LONGEST, FREE)
    assert {len(tensor) for tensor in made.model.get_input_embeddings().parameters()} == {4096}
    check_against_eager(model, LONGEST, FREE)
