"""Layers of Gated DeltaNet models that run in one C call give the same bits as the Python
layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer.config import ModelConfig
from batchinfer.kernels.cpu import delta_layer
from batchinfer.kernels.cpu.recurrent_state import supports
from batchinfer.worker.fusion import native_delta_layers
from batchinfer.worker.fusion.native_delta_layers import NativeDeltaLayer
from batchinfer.worker.fusion.native_layers import NativeDecoderLayers, NativeLayers
from batchinfer.worker.loader import LoadedModel, load_model
from tests.models import make_checkpoint
from tests.parity import CPU, Setup, run, tokens_of

pytestmark = pytest.mark.skipif(
    not supports(torch.float32), reason="not supported on this processor"
)


def load(folder: Path, dtype: str, quantization: str | None = None) -> LoadedModel:
    choice = ModelConfig(str(folder), dtype=dtype, quantization=quantization)
    return load_model(choice, device=CPU)


def native_layers(loaded: LoadedModel, kind: type[NativeLayers]) -> list[NativeLayers]:
    return [module for module in loaded.model.modules() if isinstance(module, kind)]


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_layers_have_the_bits_of_python_layers(
    family: str, dtype: str, quantization: str | None, tmp_path: Path
) -> None:
    loaded = load(make_checkpoint(family, tmp_path), dtype, quantization)
    # The layers of OLMo Hybrid normalize their outputs, so they are not fused.
    counts = [len(native_layers(loaded, kind)) for kind in (NativeDeltaLayer, NativeDecoderLayers)]
    assert counts == ([3, 1] if family == "qwen3_5_text" else [0, 0])
    native, _ = run(loaded, Setup(max_tokens=33, n=2, temperature=1.0))
    for layer in native_layers(loaded, NativeLayers):
        layer.forward = layer.run_in_python  # type: ignore[method-assign]
    in_python, _ = run(loaded, Setup(max_tokens=33, n=2, temperature=1.0))
    assert tokens_of(native) == tokens_of(in_python)
    logprobs = [
        [output.cumulative_logprob for output in completion.outputs]
        for completions in (native, in_python)
        for _, completion in sorted(completions.items())
    ]
    assert logprobs[: len(native)] == logprobs[len(native) :]


def test_rows_continue_after_a_layer_ran_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(make_checkpoint("qwen3_5_text", tmp_path), "float32")
    before, _ = run(loaded, Setup())
    calls: list[int] = []
    monkeypatch.setattr(native_delta_layers, "delta_layer", partial(_fail_second, calls))
    after, _ = run(loaded, Setup())
    assert len(calls) > 2
    assert tokens_of(after) == tokens_of(before)


def _fail_second(calls: list[int], layer: Any, step: Any, dtype: torch.dtype) -> None:
    calls.append(step.num_tokens)
    if len(calls) == 2:
        raise MemoryError
    delta_layer.delta_layer(layer, step, dtype)
