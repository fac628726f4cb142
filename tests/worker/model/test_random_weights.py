"""Models with random weights, made by transformers' classes without weight files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchinfer import LLM, SamplingParams
from batchinfer.config import ModelConfig
from batchinfer.errors import ModelError
from batchinfer.worker.loader import load_model
from tests.models import make_checkpoint, make_text_model, tiny_config
from tests.parity import CPU, Setup, assert_greedy, run
from tests.wrappers import make_wrapper


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_random_weights_are_the_initial_weights_of_the_class(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(str(tmp_path)), device=CPU, random_weights=True)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config).eval()
    completions, _ = run(loaded, Setup(block_size=4, max_tokens=7))
    assert_greedy(reference, completions)


def test_random_weights_need_no_weight_files_and_keep_the_random_state(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    state = torch.random.get_rng_state()
    one, other = (
        load_model(ModelConfig(str(tmp_path)), device=CPU, random_weights=True) for _ in range(2)
    )
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(torch.random.get_rng_state(), state), (
        "loading must not change the program's random state"
    )


def test_a_multimodal_model_gets_random_weights_for_its_language_model(tmp_path: Path) -> None:
    make_wrapper("qwen3_vl", tmp_path)
    loaded = load_model(ModelConfig(str(tmp_path)), device=CPU, random_weights=True)
    assert {name for name, _ in loaded.model.named_children()} == {"model", "lm_head"}


def test_weights_that_would_be_quantized_are_refused(tmp_path: Path) -> None:
    values = tiny_config("llama").to_dict()
    section = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": section}))
    with pytest.raises(ModelError, match=r"remove quantization_config"):
        load_model(ModelConfig(str(tmp_path)), device=CPU, random_weights=True)


def test_load_format_dummy_takes_random_weights(tmp_path: Path) -> None:
    make_text_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for quantization in (None, "int8"):
        llm = LLM(tmp_path, load_format="dummy", quantization=quantization, num_kv_blocks=8)
        (output,) = llm.generate("abc", params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(ModelError, match="has no weights"):
        LLM(tmp_path)
