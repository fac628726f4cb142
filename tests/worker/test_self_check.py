from __future__ import annotations

import pytest
import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import ModelError
from batchinfer.worker.attention.attention import ATTENTION_NAME, register
from batchinfer.worker.family_check import check_attention
from tests.models import FAMILIES, tiny_model


def model_and_layout(family: str) -> tuple[torch.nn.Module, KVLayout]:
    register()
    model = tiny_model(family)
    model.set_attn_implementation(ATTENTION_NAME)
    return model, KVLayout.from_config(model.config.to_dict(), block_size=1, dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_what_can_be_run(family: str) -> None:
    check_attention(*model_and_layout(family))


def test_a_layer_with_its_own_attention() -> None:
    model, layout = model_and_layout("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match=r"'llama' cannot be run: .*in order \(layer 2\)"):
        check_attention(model, layout)
    model.model.layers[2].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match="1 of its 3 layers"):
        check_attention(model, layout)


def test_more_layers_attend_than_the_config_has() -> None:
    model, layout = model_and_layout("llama")
    model.model.layers[2].self_attn.layer_idx = 3
    with pytest.raises(ModelError, match="'llama' cannot be run: layer 3 attends, and by"):
        check_attention(model, layout)


def test_keys_of_another_shape_than_the_config_says() -> None:
    model, _ = model_and_layout("llama")
    model.config.num_key_value_heads = 1
    wrong = KVLayout.from_config(model.config.to_dict(), block_size=1, dtype="float32")
    with pytest.raises(ModelError, match="layer 0 has keys and values"):
        check_attention(model, wrong)


def test_a_window_that_the_layer_does_not_ask_for() -> None:
    model, layout = model_and_layout("gemma2")
    model.model.layers[2].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="layer 2 is of the type sliding_attention"):
        check_attention(model, layout)


def test_a_model_that_ignores_positions() -> None:
    model, layout = model_and_layout("llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
    check_attention(model, layout)  # rotary positions are relative: shifting both is no harm
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None] ** 2)
    with pytest.raises(ModelError, match="beside a row"):
        check_attention(model, layout)


def test_a_model_that_mixes_neighbours() -> None:
    model, layout = model_and_layout("llama")
    embed = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: embed(ids).cumsum(1)
    with pytest.raises(ModelError, match="beside a row"):
        check_attention(model, layout)
