"""Dense models run on a fake CUDA device, from loading to sampled ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer import SamplingParams
from tests.fake_cuda.device import FakeCuda
from tests.fake_cuda.models import QWEN3_06B, load_model


def test_qwen3_loads_fused_and_replays_graphs(
    fake_cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "batchinfer.llm"):
        llm = load_model(fake_cuda, tmp_path, "qwen3", QWEN3_06B)
    fused = "fused modules: 1 x attention, 1 x gated MLP, 3 x norm, 1 x layer"
    assert fused in caplog.messages
    loading = fake_cuda.take_launches()
    assert {"_rotary_write_kernel", "_silu_mul_kernel", "_rms_norm_kernel"} <= loading.keys()
    prompts = [{"prompt_token_ids": [7] * length} for length in (20, 3)]
    params = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=1, top_k=5, repetition_penalty=1.1, logprobs=2, max_tokens=3),
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
    running = fake_cuda.take_launches()
    assert {"_chunk_kernel", "_decode_kernel", "_sample_kernel"} <= running.keys()
    assert fake_cuda.num_replays == 4
