"""Quantized models have the same logits as in transformers, in fewer bytes; bad settings fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from batchinfer.config import ModelConfig
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.errors import ModelError
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.memory import model_bytes
from batchinfer.worker.model.quantization import check_quantization
from tests.lora import make_adapter
from tests.models import VOCAB_SIZE, make_checkpoint, tiny_model
from tests.worker.step_maker import StepMaker

pytest.importorskip("torchao")

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 96}


def theirs(method: str) -> Any:
    """Return the torchao configuration that our method corresponds to."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig

    if method == "int8_weight_only":
        return Int8WeightOnlyConfig(version=2)
    return PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(family, tmp_path_factory.mktemp(family), **WIDE)
        return made[family]

    return make


IDS = np.random.default_rng(0).integers(2, VOCAB_SIZE, 21).tolist()


def logits_of(loaded: LoadedModel, adapter: int = 0) -> torch.Tensor:
    dtype = getattr(torch, loaded.dtype)
    cache = KVCache(loaded.layout(16), 8, CPU, dtype)
    maker = StepMaker(8, 16)
    step = maker.step([(maker.sequence(IDS), len(IDS))], every_logit=True)
    if adapter:
        step = replace(step, adapters=np.array([adapter], dtype=np.int32))
    return forward(loaded.model, cache, make_backend(cache), step).float()


@torch.inference_mode()
def logits_of_transformers(folder: Path, dtype: str, **options: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **options)
    return model(input_ids=torch.tensor([IDS])).logits[0].float()


def assert_alike(ours: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert (ours - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["int8_weight_only", "int4_weight_only"])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_logits_equal_those_of_transformers(
    checkpoint: Callable[[str], Path], family: str, method: str, dtype: str
) -> None:
    folder = checkpoint(family)
    loaded = load_model(ModelConfig(str(folder), dtype=dtype, quantization=method), device=CPU)
    config = TorchAoConfig(theirs(method))
    wanted = logits_of_transformers(folder, dtype, quantization_config=config)
    assert_alike(logits_of(loaded), wanted, 1e-4 if dtype == "float32" else 3e-2)
    plain = logits_of_transformers(folder, "float32")
    assert (wanted - plain).norm() > 1e-2 * plain.norm(), "it is quantized"
    assert loaded.facts["quantization"] == method


@pytest.mark.parametrize(
    "name",
    [
        "Int8WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "IntxWeightOnlyConfig",
        "Int8DynamicActivationIntxWeightConfig",
    ],
)
def test_a_quantized_checkpoint_is_loaded_as_it_was_saved(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    import torchao.quantization as ao

    options = {"weight_dtype": torch.int4} if name == "IntxWeightOnlyConfig" else {}
    config = TorchAoConfig(getattr(ao, name)(**options))
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), quantization_config=config)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([IDS])).logits[0]
    loaded = load_model(ModelConfig(str(tmp_path)), device=CPU)
    # A tiny difference can change an activation's 8-bit code.
    assert_alike(logits_of(loaded), wanted, 5e-2 if "Dynamic" in name else 1e-4)
    assert loaded.facts["quantization"] == name
    with pytest.raises(ModelError, match="weights are already quantized; remove the key"):
        load_model(ModelConfig(str(tmp_path), quantization="int8_weight_only"), device=CPU)


def test_bytes_of_kept_codes_are_counted(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    config = json.loads((folder / "config.json").read_text())
    embeddings = 2 * VOCAB_SIZE * 64
    matrices = 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96)
    rows = 3 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    norms = 7 * 64
    for method, wanted in (
        ("int8_weight_only", matrices + rows * (4 + 1)),
        ("int4_weight_only", matrices // 2 + matrices // 32 * 2 * 4),
    ):
        loaded = load_model(ModelConfig(str(folder), quantization=method), device=CPU)
        rest = loaded.facts["weight_bytes"] - 4 * (embeddings + norms)
        frequencies = rest - wanted
        assert 0 <= frequencies < 400, "only the rotary frequencies remain"
        assert model_bytes(loaded.model) == loaded.facts["weight_bytes"]
        cost = ModelCost.from_config(config, "float32", quantization=method)
        assert cost.weight_bytes == pytest.approx(loaded.facts["weight_bytes"], rel=0.1)
        plain = ModelCost.from_config(config, "float32")
        assert cost.weights_read(1) < plain.weights_read(1) / 2


def test_adapters_are_added_to_quantized_layers(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model("llama", **WIDE)
    make_adapter(base, tmp_path / "a", seed=1, r=4, target_modules=["q_proj", "down_proj"])
    loaded = load_model(
        ModelConfig(
            str(checkpoint("llama")),
            quantization="int8_weight_only",
            adapters={"a": str(tmp_path / "a")},
        ),
        device=CPU,
    )
    with torch.inference_mode():
        # peft has merged the adapter into the weights.
        wanted = base(input_ids=torch.tensor([IDS])).logits[0]
    assert_alike(logits_of(loaded, adapter=1), wanted, 0.2)
    assert (logits_of(loaded) - wanted).norm() > 0.5 * wanted.norm()


# Refused settings


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits .* is 3; .* not yet"),
        ({"quant_method": "quip"}, "quantized by quip .* not yet .* one of awq, bits"),
        ({"load_in_8bit": True}, "quantized by an unnamed method .* not yet"),
        (
            {"quant_method": "torchao"},
            "torchao's None, .* not yet .* types are: Int8WeightOnly",
        ),
        (
            {"quant_method": "torchao", "quant_type": "int8_weight_only"},
            "torchao's int8_weight_only, .* not yet",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "quantize_"}}},
            "torchao's quantize_.* not yet",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {
                        "_type": "Int8WeightOnlyConfig",
                        "_data": {"a": [{"_type": "quantize_", "_data": {}}]},
                    }
                },
            },
            "names an unknown class, quantize_",
        ),
    ],
)
def test_unknown_quantization_is_refused_before_weights_load(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: Any,
    message: str,
) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": saved}))
    (tmp_path / "model.safetensors").symlink_to(checkpoint("llama") / "model.safetensors")
    monkeypatch.setattr("batchinfer.worker.loader.load_weights", _not_reached)
    with pytest.raises(ModelError, match=message):
        load_model(ModelConfig(str(tmp_path)), device=CPU)


def _not_reached(*_: Any) -> None:
    raise AssertionError("weights are loaded")


def test_models_that_cannot_be_quantized_are_refused(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path / "gpt2")
    with pytest.raises(ModelError, match="'gpt2' have no linear layers that can be quantized"):
        load_model(ModelConfig(str(tmp_path / "gpt2"), quantization="int8_weight_only"), device=CPU)
    make_checkpoint("llama", tmp_path / "odd", intermediate_size=48)
    with pytest.raises(ModelError, match=r"int4_weight_only needs .* divisible by 32"):
        load_model(ModelConfig(str(tmp_path / "odd"), quantization="int4_weight_only"), device=CPU)


def test_without_torchao_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    saved: Mapping[str, Any] = {
        "quantization_config": {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
        }
    }
    for config, wanted in (({}, "int8_weight_only"), (saved, None)):
        with pytest.raises(ModelError, match=r"pip install '\.\[quantization\]'"):
            check_quantization(config, wanted, "cpu")
