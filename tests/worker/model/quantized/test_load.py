"""Quantized checkpoints give the same logits as a float model with the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from batchinfer.config import ModelConfig
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.errors import ModelError
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import LoadedModel, load_model
from tests.models import VOCAB_SIZE
from tests.worker.model.quantized.checkpoints import write_quantized
from tests.worker.model.quantized.writers import CASES, Written, float8, mxfp4
from tests.worker.step_maker import StepMaker

CPU = torch.device("cpu")
IDS = np.random.default_rng(0).integers(2, VOCAB_SIZE, 21).tolist()


def experts_alone(weight: torch.Tensor) -> Written:
    """Quantize the experts of gpt-oss, and leave its other weights unchanged."""
    return mxfp4(weight) if weight.dim() == 3 else Written({"weight": weight}, weight)


def load(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelConfig(str(folder), dtype=dtype), device=CPU)


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    layout = loaded.layout(16)
    num_slots, per_state = 8 + layout.slots_per_state, layout.slots_per_state
    cache = KVCache(layout, num_slots, CPU, getattr(torch, loaded.dtype))
    maker = StepMaker(num_slots, 16, slots_per_state=per_state)
    step = maker.step([(maker.sequence(IDS), len(IDS))], every_logit=True)
    return forward(loaded.model, cache, make_backend(cache), step).float()


@torch.inference_mode()
def logits_of_transformers(folder: Path, **options: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model(input_ids=torch.tensor([IDS])).logits[0]


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
ALL_SEE_ALL = {"layer_types": ["full_attention", "full_attention"]}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
FP8_BLOCKS = partial(float8, block=(32, 32), end="weight_scale_inv")


@pytest.mark.parametrize(
    ("family", "dtype", "case", "changes"),
    [
        ("llama", "float32", "gptq sorted", {}),
        ("llama", "bfloat16", "awq", {"tie_word_embeddings": True}),
        ("qwen2", "float32", "nf4 nested", {}),
        ("qwen3_moe", "bfloat16", "packed int4", {"moe_intermediate_size": 32}),
        ("deepseek_v3", "float32", "fp8 blocks", {}),
        ("qwen3_vl", "float32", "fp8 blocks", {}),
        ("qwen3_5_text", "float32", "fp8 blocks", HYBRID),
        ("qwen3_5_moe_text", "float32", "fp8 blocks", HYBRID),
        ("qwen3_5_moe_text", "bfloat16", "nvfp4", {**HYBRID, "moe_intermediate_size": 32}),
        ("qwen3_moe", "float32", "nvfp4 modelopt", {"moe_intermediate_size": 32}),
        ("lfm2", "bfloat16", "fp8 blocks", {"layer_types": ["conv", "full_attention"]}),
    ],
)
def test_logits_equal_those_of_the_dequantized_weights(
    tmp_path: Path, family: str, dtype: str, case: str, changes: dict[str, Any]
) -> None:
    folder, plain = write_quantized(tmp_path, family, *CASES[case], **changes)
    loaded, wanted = load(folder, dtype), load(plain, dtype)
    assert torch.equal(logits_of(loaded), logits_of(wanted))
    section, _ = CASES[case]
    assert str(loaded.facts["quantization"]).startswith(section["quant_method"])
    assert loaded.facts["weight_bytes"] == wanted.facts["weight_bytes"]
    costs = [ModelCost.from_config(each.config, dtype) for each in (loaded, wanted)]
    assert costs[0].weight_bytes == costs[1].weight_bytes


@pytest.mark.parametrize(
    ("family", "section", "writer", "options", "changes"),
    [
        ("qwen3", FP8, FP8_BLOCKS, FineGrainedFP8Config, {}),
        ("gpt_oss", MXFP4, experts_alone, Mxfp4Config, ALL_SEE_ALL),
    ],
    ids=["fp8", "mxfp4"],
)
def test_logits_equal_those_of_transformers(
    tmp_path: Path,
    family: str,
    section: dict[str, Any],
    writer: Callable[[torch.Tensor], Written],
    options: Any,
    changes: dict[str, Any],
) -> None:
    folder, plain = write_quantized(tmp_path, family, section, writer, **changes)
    ours = logits_of(load(folder))
    assert torch.equal(ours, logits_of(load(plain)))
    theirs = logits_of_transformers(folder, quantization_config=options(dequantize=True))
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


def test_modelopt_may_describe_the_format_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder, plain = write_quantized(tmp_path, "llama", *CASES["nvfp4 modelopt"])
    config = json.loads((folder / "config.json").read_text())
    section = config.pop("quantization_config")
    section |= {"group_size": 16, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": section}))
    loaded = load(folder)
    assert torch.equal(logits_of(loaded), logits_of(load(plain)))
    assert loaded.facts["quantization"] == "modelopt NVFP4, dequantized when loaded"
    for value, message in (
        (
            section | {"quant_algo": "NVFP4_SVD"},
            r"hf_quant_config.json, .* is NVFP4_SVD; supported",
        ),
        (["NVFP4"], r"hf_quant_config.json has no object at the key quantization"),
    ):
        path.write_text(json.dumps({"quantization": value}))
        with pytest.raises(ModelError, match=message):
            load(folder)


def test_quantization_config_may_be_in_text_config(tmp_path: Path) -> None:
    folder, plain = write_quantized(tmp_path, "kimi_k25", *CASES["gptq"])
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(load(folder)), logits_of(load(plain)))
