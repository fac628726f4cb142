"""Families and features run on a fake CUDA device, with models that load in a few seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer import SamplingParams
from tests.fake_cuda.device import FakeCuda
from tests.fake_cuda.models import load_model
from tests.models import INTERLEAVED_FAMILIES

pytestmark = pytest.mark.long

PROMPTS = [{"prompt_token_ids": [7] * length} for length in (20, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=3)


@pytest.mark.parametrize(
    "family",
    [
        *("gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "cohere2", "qwen3_next"),
        *("bamba", "mamba", "lfm2", *INTERLEAVED_FAMILIES),
    ],
)
def test_families_replay_graphs(
    family: str, fake_cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "batchinfer.llm"):
        llm = load_model(fake_cuda, tmp_path, family, {})
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
    assert fake_cuda.num_replays == 4, caplog.messages
    fused = fake_cuda.take_launches()["_multiply_experts_kernel"] > 0
    assert fused == (family in ("gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_next"))
