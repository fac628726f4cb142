"""Models with linear layers that have 8-bit or 4-bit weights and round input rows to int8."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from batchinfer.config import ModelConfig
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.errors import DeviceError, ModelError
from batchinfer.kernels.low_bit import Int8Weight, LowBitWeight, low_bit_product
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.fusion.native_layers import NativeDecoderLayers
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear.batch_invariance import check_batch_invariance
from batchinfer.worker.linear.packed_linear import PackedLinear, merged, pack_prequantized
from batchinfer.worker.linear.prequantized_weights import codes_of, keep_codes
from batchinfer.worker.linear_kernels import LOW_BIT_METHODS, codes_kernel
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.memory import model_bytes
from batchinfer.worker.model.quantization import check_quantization
from tests.lora import make_adapter
from tests.models import VOCAB_SIZE, make_checkpoint, tiny_model
from tests.worker.step_maker import StepMaker

pytestmark = pytest.mark.skipif(
    codes_kernel("int8", torch.float32) is None, reason="no C compiler here"
)
methods = pytest.mark.parametrize("method", LOW_BIT_METHODS)

CPU = torch.device("cpu")
IDS = np.random.default_rng(0).integers(2, VOCAB_SIZE, 21).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder, wide = tmp_path_factory.mktemp(family), {}
            if family != "gpt2":
                wide = {"hidden_size": 64, "intermediate_size": 96}
            made[family] = make_checkpoint(family, folder, **wide)
        return made[family]

    return make


def load(folder: Path, method: str, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelConfig(str(folder), dtype=dtype, quantization=method), device=CPU)


def logits_of(model: nn.Module, loaded: LoadedModel, adapter: int = 0) -> torch.Tensor:
    cache = KVCache(loaded.layout(16), 8, CPU, getattr(torch, loaded.dtype))
    maker = StepMaker(8, 16)
    step = maker.step([(maker.sequence(IDS), len(IDS))], every_logit=True)
    if adapter:
        step = replace(step, adapters=np.array([adapter], dtype=np.int32))
    return forward(model, cache, make_backend(cache), step).float()


class Rounded(nn.Module):
    """A linear layer that computes with torch what the kernels compute."""

    def __init__(self, linear: nn.Linear, weight: LowBitWeight) -> None:
        super().__init__()
        self.weight, self.bias, self.codes = linear.weight, linear.bias, weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.detach()
        return low_bit_product(x.flatten(0, -2), self.codes, bias).unflatten(0, x.shape[:-1])


def linears(model: Any) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (parent module, name in the parent, layer) for each linear layer."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                yield parent, name, child


def rounded(linear: nn.Linear, name: str, method: str) -> LowBitWeight:
    return LOW_BIT_METHODS["int8" if name == "lm_head" else method](linear.weight.detach())


@torch.inference_mode()
def logits_of_the_twin(folder: Path, method: str | None, dtype: str = "float32") -> torch.Tensor:
    """Return transformers' logits in float32, with quantized linear layers and an int8 head.

    Args:
        dtype: the dtype that the weights are loaded in.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).float()
    for parent, name, linear in linears(model) if method else ():
        setattr(parent, name, Rounded(linear, rounded(linear, name, method)))
    return model(input_ids=torch.tensor([IDS])).logits[0]


@methods
@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("qwen2", "float32")])
def test_logits_equal_transformers_with_equally_rounded_layers(
    checkpoint: Callable[[str], Path], family: str, dtype: str, method: str
) -> None:
    folder = checkpoint(family)
    loaded = load(folder, method, dtype)
    plain, wanted = (logits_of_the_twin(folder, one, dtype) for one in (None, method))
    ours = logits_of(loaded.model, loaded)
    assert (wanted - plain).norm() > 1e-2 * plain.norm(), "it is quantized"
    assert (ours - wanted).norm() <= (1e-5 if dtype == "float32" else 0.15) * wanted.norm()
    kernels = {
        name.rsplit(".", 1)[-1]: module.kernel.name
        for name, module in loaded.model.named_modules()
        if isinstance(module, PackedLinear)
    }
    assert kernels.pop("lm_head") == "own int8"
    assert set(kernels.values()) == {f"own {method}"}
    assert loaded.kernel_names[method] == f"own {method}"


@methods
def test_layers_are_fused_small_and_keep_a_rows_bits(
    checkpoint: Callable[[str], Path], method: str
) -> None:
    loaded = load(checkpoint("llama"), method)
    kinds = {type(module).__name__ for module in loaded.model.modules()}
    assert "NativeDecoderLayers" in kinds
    check_batch_invariance(loaded.model, loaded.layout(16), loaded.kernels.kernel)
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    cost = ModelCost.from_config(config, "float32", quantization=method, on_cpu=True)
    assert loaded.facts["weight_bytes"] == pytest.approx(cost.weight_bytes, rel=0.15)
    assert model_bytes(loaded.model) == loaded.facts["weight_bytes"]


def test_layers_that_differ_by_rounding_are_joined(tmp_path: Path) -> None:
    """Joined layers round hidden states once less, so some int8 codes may differ."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    folder = make_checkpoint("llama", tmp_path, initializer_range=0.3, **sizes)
    model = load(folder, "int8", "bfloat16").model
    joined = [len(m.layers) for m in model.modules() if isinstance(m, NativeDecoderLayers)]
    assert joined == [6]


@methods
def test_low_bit_methods_refuse_unsupported_models_and_dtypes(
    checkpoint: Callable[[str], Path], method: str
) -> None:
    with pytest.raises(DeviceError, match=r"needs a C compiler \(cc, or \$CC\), and model.dtype"):
        load(checkpoint("llama"), method, "float16")
    with pytest.raises(ModelError, match="'gpt2' have no linear layers that can be quantized"):
        load(checkpoint("gpt2"), method)


def test_int8_is_refused_on_cuda_devices() -> None:
    with pytest.raises(
        ModelError, match=r"int8 is not yet supported on CUDA devices; use fp8, int"
    ):
        check_quantization({}, "int8", "cuda")
    check_quantization({}, "int4", "cuda")


def test_adapters_are_added_to_layers_of_few_bits(tmp_path: Path) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 96}
    folder, base = make_checkpoint("llama", tmp_path / "base", **wide), tiny_model("llama", **wide)
    make_adapter(base, tmp_path / "a", seed=1, r=4, target_modules=["q_proj", "down_proj"])
    adapters = {"a": str(tmp_path / "a")}
    model = ModelConfig(str(folder), dtype="float32", quantization="int8", adapters=adapters)
    loaded = load_model(model, device=CPU)
    with torch.inference_mode():
        # peft has merged the adapter into the weights.
        wanted = base(input_ids=torch.tensor([IDS])).logits[0]
    ours, without = logits_of(loaded.model, loaded, adapter=1), logits_of(loaded.model, loaded)
    assert (ours - wanted).norm() <= 0.1 * wanted.norm()
    assert (without - wanted).norm() > 0.5 * wanted.norm()


@methods
def test_kept_codes_are_packed_without_rounding(
    checkpoint: Callable[[str], Path], method: str
) -> None:
    """This holds for merged layers too, and float weights next to the codes are ignored."""
    loaded = load_model(ModelConfig(str(checkpoint("llama")), dtype="float32"), device=CPU)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)
    for _, name, linear in linears(model):
        codes = rounded(linear, name, method)
        keep_codes(linear, lambda codes=codes: codes)
    assert fuse(model, loaded.layout(16), loaded.max_model_len)
    assert not pack_prequantized(model, torch.float16), "weights of another dtype are not packed"
    for _, _, linear in linears(model):
        linear.weight.data.zero_()
    assert pack_prequantized(model, torch.float32).keys() == {method, "int8"}
    wanted = logits_of_the_twin(checkpoint("llama"), method)
    assert (logits_of(model, loaded) - wanted).norm() <= 1e-5 * wanted.norm()


def test_codes_of_layers_that_differ_are_not_joined() -> None:
    one, other, third = (nn.Linear(64, 8) for _ in range(3))
    keep_codes(one, lambda: Int8Weight.rounded(one.weight.detach()))
    assert codes_of(merged(one, other)) is None
    keep_codes(other, lambda: LOW_BIT_METHODS["int4"](other.weight.detach()))
    assert codes_of(merged(one, other)) is None
    keep_codes(third, lambda: Int8Weight.rounded(third.weight.detach()))
    joined = codes_of(merged(one, third))
    assert isinstance(joined, Int8Weight)
    assert len(joined.codes) == 16
