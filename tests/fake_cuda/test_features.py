"""Features run on a fake CUDA device: other dtypes, sampling of all kinds, beams and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer import BeamSearchParams, LoRARequest, SamplingParams
from batchinfer.config import EngineConfig
from batchinfer.worker.linear import batch_invariance
from tests.fake_cuda.compiled import TARGETS, Compiled, uncompiled
from tests.fake_cuda.device import FakeCuda
from tests.fake_cuda.models import QWEN3_06B, QWEN3_30B, load_model
from tests.lora import make_adapter
from tests.models import tiny_model

pytestmark = pytest.mark.long

PROMPTS = [{"prompt_token_ids": [7] * length} for length in (20, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=3)
EXPERT_KERNELS = {
    *("_route_kernel", "_plan_experts_kernel", "_multiply_experts_kernel", "_add_experts_kernel")
}


@pytest.fixture(autouse=True)
def no_check_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors also call operations to name their device."""
    monkeypatch.setattr(batch_invariance, "check_operations", lambda *_: None)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an adapter of all linear layers."""
    folder = tmp_path_factory.mktemp("adapter")
    model = tiny_model("qwen3", **QWEN3_06B | {"vocab_size": 16})
    make_adapter(model, folder, seed=0, r=16, target_modules="all-linear")
    return folder


@pytest.mark.parametrize("fake_cuda", TARGETS, indirect=True)
@pytest.mark.parametrize(
    ("settings", "kernel"),
    [
        ({"kv_cache_dtype": "fp8"}, "_decode_kernel"),
        ({"quantization": "fp8"}, "_fp8_linear_kernel"),
        ({"quantization": "int4"}, "_int4_linear_kernel"),
        ({"deterministic": True}, "_batch_invariant_kernel"),
        ({"deterministic": True, "quantization": "int4"}, "_int4_linear_kernel"),
    ],
    ids=["fp8_cache", "fp8_linears", "int4_linears", "deterministic", "deterministic_int4"],
)
def test_settings_choose_other_kernels(
    settings: dict[str, Any],
    kernel: str,
    compiled: Compiled,
    fake_cuda: FakeCuda,
    tmp_path: Path,
) -> None:
    llm = load_model(fake_cuda, tmp_path, "qwen3", QWEN3_06B, **settings)
    assert uncompiled(fake_cuda.launches, compiled[fake_cuda.capability]) == []
    fake_cuda.take_launches()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
    assert uncompiled(fake_cuda.launches, compiled[fake_cuda.capability]) == []
    assert fake_cuda.take_launches()[kernel] > 0
    assert fake_cuda.num_replays == 4


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"quantization": "int4"},
        {"deterministic": True},
    ],
    ids=["plain", "fp8_cache", "fp8_linears", "int4_linears", "deterministic"],
)
def test_all_graphs_of_the_default_sizes_are_captured(
    settings: dict[str, Any],
    compiled: Compiled,
    fake_cuda: FakeCuda,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = {"max_num_seqs": EngineConfig.max_num_seqs, "num_kv_blocks": 4096}
    sizes["max_num_batched_tokens"] = EngineConfig.max_num_batched_tokens
    with caplog.at_level("INFO", "batchinfer.llm"):
        load_model(fake_cuda, tmp_path, "qwen3", QWEN3_06B, **sizes, **settings)
    assert any(line.startswith("CUDA graphs: 134 sizes captured") for line in caplog.messages)
    assert uncompiled(fake_cuda.launches, compiled[90]) == []


@pytest.mark.parametrize("fake_cuda", TARGETS, indirect=True)
def test_kernels_of_experts_are_compiled_ahead_of_time(
    compiled: Compiled, fake_cuda: FakeCuda, tmp_path: Path
) -> None:
    llm = load_model(fake_cuda, tmp_path, "qwen3_moe", QWEN3_30B)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    launches = [each for each in fake_cuda.launches if each.kernel in EXPERT_KERNELS]
    assert {each.kernel for each in launches} == EXPERT_KERNELS
    assert uncompiled(launches, compiled[fake_cuda.capability]) == []
    assert fake_cuda.num_replays == 4


def test_graphs_compute_adapters(
    compiled: Compiled, fake_cuda: FakeCuda, adapter: Path, tmp_path: Path
) -> None:
    """An adapter that is added later needs new graphs."""
    llm = load_model(fake_cuda, tmp_path, "qwen3", QWEN3_06B, enable_lora=True)
    lora = LoRARequest("adapter", 1, str(adapter))
    with fake_cuda.loading():
        llm.generate(PROMPTS[:1], GREEDY, lora_request=lora, use_tqdm=False)
    assert uncompiled(fake_cuda.launches, compiled[90]) == []
    fake_cuda.take_launches()
    fake_cuda.num_replays = 0
    outputs = llm.generate(PROMPTS, GREEDY, lora_request=[lora, None], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
    assert {"_lora_shrink_kernel", "_lora_expand_kernel"} <= fake_cuda.take_launches().keys()
    assert fake_cuda.num_replays == 3


def test_latents_are_cached(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    llm = load_model(fake_cuda, tmp_path, "deepseek_v3", {"kv_lora_rank": 64}, latent_cache=True)
    fake_cuda.take_launches()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert {"_mla_decode_kernel", "_mla_chunk_kernel"} <= fake_cuda.take_launches().keys()
    assert fake_cuda.num_replays == 4


def test_sampling_beams_and_scores_do_not_wait(
    compiled: Compiled, fake_cuda: FakeCuda, tmp_path: Path
) -> None:
    llm = load_model(fake_cuda, tmp_path, "qwen3", QWEN3_06B, max_num_seqs=4)
    params = [
        SamplingParams(n=2, top_p=0.9, min_p=0.1, presence_penalty=0.5, max_tokens=2),
        SamplingParams(temperature=0, prompt_logprobs=2, logprobs=3, max_tokens=2),
        SamplingParams(logit_bias={3: 1.0}, allowed_token_ids=[3, 4, 5], max_tokens=2),
    ]
    outputs = llm.generate([*PROMPTS, PROMPTS[0]], params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [2, 1, 1]
    beams = llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=2, max_tokens=2))
    assert len(beams[0].outputs) == 2
    changed = SamplingParams(beam_width=2, min_tokens=2, max_tokens=2, logprobs=2)
    changed.repetition_penalty, changed.logit_bias = 1.5, {3: 1.0}
    (output,) = llm.generate(PROMPTS[:1], changed, use_tqdm=False)
    assert len(output.outputs[0].logprobs) == 2
    assert uncompiled(fake_cuda.launches, compiled[90]) == []
    launches = fake_cuda.take_launches()
    assert {"_penalties_kernel", "_sample_rest_kernel", "_row_stats_kernel"} <= launches.keys()
    assert launches["_block_copy_kernel"] > 0
