"""Dense models run on a fake CUDA device, from loading to sampled ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer import SamplingParams
from tests.fake_cuda.compiled import TARGETS, Compiled, uncompiled
from tests.fake_cuda.device import FakeCuda
from tests.fake_cuda.launches import Launch
from tests.fake_cuda.models import LLAMA_8B, QWEN3_06B, load_model


def test_qwen3_loads_fused_and_replays_graphs(
    compiled: Compiled, fake_cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "batchinfer.llm"):
        llm = load_model(fake_cuda, tmp_path, "qwen3", QWEN3_06B)
    assert "fused modules: 1 x attention, 1 x gated MLP, 3 x norm, 1 x layer" in caplog.messages
    assert uncompiled(fake_cuda.launches, compiled[90]) == []
    loading = fake_cuda.take_launches()
    assert {"_rotary_write_kernel", "_silu_mul_kernel", "_rms_norm_kernel"} <= loading.keys()
    prompts = [{"prompt_token_ids": [7] * length} for length in (20, 3)]
    params = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=1, top_k=5, repetition_penalty=1.1, logprobs=2, max_tokens=3),
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
    assert uncompiled(fake_cuda.launches, compiled[90]) == []
    running = fake_cuda.take_launches()
    assert {"_chunk_kernel", "_decode_kernel", "_sample_kernel"} <= running.keys()
    assert fake_cuda.num_replays == 4


@pytest.mark.long
@pytest.mark.parametrize("fake_cuda", TARGETS, indirect=True)
@pytest.mark.parametrize(("family", "shape"), [("qwen3", QWEN3_06B), ("llama", LLAMA_8B)])
def test_kernels_of_a_job_are_compiled_ahead_of_time(
    family: str,
    shape: dict[str, Any],
    compiled: Compiled,
    fake_cuda: FakeCuda,
    tmp_path: Path,
) -> None:
    """The job has prompts with a shared prefix, prompts that are cut, and many sequences."""
    llm = load_model(
        fake_cuda, tmp_path, family, shape, max_num_seqs=80, max_num_batched_tokens=640
    )
    prefix = [7] * 600
    prompts = [{"prompt_token_ids": [*prefix, number]} for number in range(3)]
    prompts += [{"prompt_token_ids": [number, 5]} for number in range(70)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    llm.generate(prompts[0], SamplingParams(top_k=5, max_tokens=2, logprobs=1), use_tqdm=False)
    assert uncompiled(fake_cuda.launches, compiled[fake_cuda.capability]) == []


def test_signatures_that_are_not_compiled_are_named(compiled: Compiled) -> None:
    signature = next(each for each in compiled[90] if each.kernel == "_rms_norm_kernel")
    assert signature in compiled[90]
    wider = signature._replace(arguments=(*signature.arguments[:-1], ("constexpr", 1)))
    other = signature._replace(kernel="_other_kernel")
    launches = [Launch(each.kernel, (1,), {}, each) for each in (signature, wider, other)]
    first, second = uncompiled(launches, compiled[90])
    assert first.startswith("_rms_norm_kernel is compiled only for other arguments: argument 8: ")
    assert second == "_other_kernel is not compiled"
