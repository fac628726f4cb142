"""Some encoders run all their layers in one call, and the others run torch's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.bert.modeling_bert import BertConfig, BertLayer

from batchinfer.config import ModelConfig
from batchinfer.kernels.cpu import encoder_layers
from batchinfer.worker.encoder import native_layers
from batchinfer.worker.encoder.encode_and_pool import ModelEncoder
from batchinfer.worker.encoder.loader import LoadedEncoder, load_encoder
from batchinfer.worker.encoder.native_layers import NativeEncoderLayers, join_encoder_layers
from batchinfer.worker.linear.kernel_choice import KernelRequirements
from batchinfer.worker.linear_kernels import linear_kernels
from tests.encoders import FAMILIES, make_encoder, reference_states
from tests.worker.encoder.test_loader import SAME, cosines, sequences, step

pytestmark = pytest.mark.skipif(
    not encoder_layers.supports(torch.float32), reason="no C compiler here"
)
CPU = torch.device("cpu")
OWN = KernelRequirements("own")
JOINED = {"bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert"}


def loaded(
    folder: Path, dtype: Any = "float32", kernels: KernelRequirements = OWN
) -> LoadedEncoder:
    model = ModelConfig(str(folder), dtype=dtype, runner="pooling")
    return load_encoder(model, device=CPU, kernels=kernels)


def is_joined(one: LoadedEncoder) -> bool:
    return any(isinstance(module, NativeEncoderLayers) for module in one.encoder.body.modules())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_like_berts_are_joined(tmp_path: Path, family: str, dtype: str) -> None:
    one = loaded(make_encoder(tmp_path / "model", family), dtype)
    assert is_joined(one) == (family in JOINED)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_activations_equal_those_of_transformers(tmp_path: Path, activation: str) -> None:
    folder, rows = make_encoder(tmp_path / "model", "bert", hidden_act=activation), sequences()
    one = loaded(folder)
    assert is_joined(one) == (activation != "silu")
    vectors = ModelEncoder(one.encoder, CPU).encode(step(rows, "mean"))
    expected = [states.mean(0) for states in reference_states(folder, rows)]
    assert cosines(vectors, expected).min() > SAME


def test_layers_with_other_outputs_are_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(native_layers._ACTIVATIONS, torch.nn.SiLU, "relu")
    folder = make_encoder(tmp_path / "model", "bert", hidden_act="swish")
    one = loaded(folder)
    assert not is_joined(one)
    expected = [states.mean(0) for states in reference_states(folder, sequences())]
    vectors = ModelEncoder(one.encoder, CPU).encode(step(sequences(), "mean"))
    assert cosines(vectors, expected).min() > SAME


def test_layers_of_several_widths_are_not_joined() -> None:
    """All layers of a call use the workspace of the first one, which would be too small."""
    shape = {"hidden_size": 32, "num_attention_heads": 2}
    layers = [
        BertLayer(BertConfig(**shape, intermediate_size=width, attn_implementation="eager"))
        for width in (48, 96)
    ]
    body = torch.nn.Sequential(torch.nn.ModuleList(layers)).requires_grad_(False)
    own = linear_kernels(torch.float32)[0]
    assert not join_encoder_layers(body, own, torch.float32, lambda: True)


def test_layers_with_other_kernels_are_not_joined(tmp_path: Path) -> None:
    assert not is_joined(
        loaded(make_encoder(tmp_path / "model", "bert"), kernels=KernelRequirements("torch"))
    )


def test_weights_of_joined_layers_count_once(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "bert")
    joined, apart = loaded(folder), loaded(folder, kernels=KernelRequirements("torch"))
    assert joined.facts["parameters"] == apart.facts["parameters"]
    assert joined.facts["weight_bytes"] == apart.facts["weight_bytes"]


def test_steps_grow_and_shrink(tmp_path: Path) -> None:
    """The workspace's contents from one step do not affect the next."""
    one = ModelEncoder(loaded(make_encoder(tmp_path / "model", "bert"), "bfloat16").encoder, CPU)
    rows = sequences()
    whole = one.encode(step(rows, "mean"))
    for many in (1, 3, len(rows), 2):
        np.testing.assert_array_equal(one.encode(step(rows[:many], "mean")), whole[:many])
