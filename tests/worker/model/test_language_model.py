"""From text, models that also take images or audio generate the same tokens as transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from batchinfer.config import ModelConfig
from batchinfer.errors import ModelError
from batchinfer.worker.loader import load_model
from batchinfer.worker.model.config import load_config
from tests.lora import make_adapter
from tests.parity import CPU, Setup, assert_greedy, run
from tests.wrappers import FAMILIES, make_wrapper


@pytest.mark.parametrize(
    ("family", "block_size"), [(family, (4, 16)[at % 2]) for at, family in enumerate(FAMILIES)]
)
def test_greedy_equals_the_whole_model(family: str, block_size: int, tmp_path: Path) -> None:
    """Prompts run in chunks of 7 tokens, in a pool that holds few rows."""
    whole = make_wrapper(family, tmp_path)
    if family == "llama4":  # in transformers 5.24 the wrapper fails on text without images
        whole = whole.language_model
    loaded = load_model(ModelConfig(str(tmp_path)), device=CPU)
    completions, _ = run(loaded, Setup(block_size=block_size, max_tokens=7, pool_tokens=160))
    assert_greedy(whole, completions)


def test_towers_are_not_loaded(tmp_path: Path) -> None:
    make_wrapper("qwen3_vl", tmp_path)
    loaded = load_model(ModelConfig(str(tmp_path)), device=CPU)
    assert {name for name, _ in loaded.model.named_children()} == {"model", "lm_head"}
    assert loaded.facts["family"] == "qwen3_vl"


def test_an_adapter_of_a_multimodal_model_changes_its_language_model(tmp_path: Path) -> None:
    whole = make_wrapper("qwen3_vl", tmp_path / "model")
    make_adapter(whole, tmp_path / "adapter", seed=1, target_modules=["q_proj", "down_proj"])
    choice = ModelConfig(str(tmp_path / "model"), adapters={"one": str(tmp_path / "adapter")})
    (adapter,) = load_model(choice, device=CPU).lora
    first = adapter.targets[0]
    assert first.saved == "model.language_model.layers.0.mlp.down_proj"
    assert first.module == "model.layers.0.mlp.down_proj"
    assert [factor.shape for factor in adapter.factors(first)] == [(8, 48), (32, 8)]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("muse_glimmer", r"they scale or cap their logits \(final_logit_softcapping\)"),
        ("paligemma", "its attention over the prompt is bidirectional"),
    ],
)
def test_unsupported_multimodal_models_are_refused_with_the_reason(
    family: str, message: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_config(tmp_path)
