"""The tasks of first light run on a fake CUDA device, up to the comparison of results."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch

from tests.fake_cuda.compiled import Compiled, uncompiled
from tests.fake_cuda.device import FakeCuda

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_bench
import gpu_models
import gpu_operators
import gpu_smoke
from gpu_results import Results
from gpu_workloads import Job

from batchinfer.config import EngineConfig


@pytest.mark.long
@pytest.mark.parametrize("layer_major", [False, True])
def test_steps_of_the_smoke_test_have_graphs_and_compiled_kernels(
    layer_major: bool,
    compiled: Compiled,
    fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_smoke, "_fill", lambda *_: None)  # counts slots on the device
    settings = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=256)
    with fake_cuda.loading(), torch.inference_mode():
        built = gpu_models.ready(
            "two layers of Qwen3-0.6B",
            fake_cuda.device,
            torch.bfloat16,
            settings,
            layer_major=layer_major,
        )
        assert built.facts["ok"]
        for steps in (
            gpu_smoke._Steps(4),
            gpu_smoke._Steps(4, shared=512),
            gpu_smoke._Steps(2, chunks=2, chunk=9),
        ):
            step = gpu_smoke._make_step(built, steps)
            fake_cuda.num_replays = 0
            (expected, _), (got, _) = gpu_smoke._run_both(built, step)
            assert got.shape == expected.shape == (4, built.vocab)
            assert fake_cuda.num_replays == 1
    measured = gpu_bench._run(built, [Job(9, 0, 3), Job(20, 0, 2, samples=2)], seed=0)
    assert measured["output_tokens"] == 7
    assert uncompiled(fake_cuda.launches, compiled[90]) == []
    assert "_shared_kernel" in fake_cuda.take_launches()


def test_attention_in_a_whole_pool_is_measured(
    fake_cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time passes from one measurement to the next, but not on the fake device."""
    results, device, seconds = Results(tmp_path), fake_cuda.device, gpu_operators.seconds
    clock = itertools.count(1.0)
    monkeypatch.setattr(gpu_operators, "seconds", lambda *of: seconds(*of) and next(clock))
    monkeypatch.setattr(gpu_operators, "_spread", lambda count, context: [context] * count)
    with fake_cuda.loading():
        ceilings = gpu_operators.measure_ceilings(device, torch.bfloat16)
        gpu_operators.attention(
            results, device, ceilings, "Llama-3.1-8B", brief=True, dry_run=False
        )
    cells = results.read()["attention"].values()
    assert len(cells) == 2
    for cell in cells:
        assert cell.keys() >= {"bytes_per_s", "share_of_copy", "seconds_of_plan"}, cell
        assert 60e9 < cell["pool_bytes"] < 80e9
        assert cell["seconds"] == 1 / 32
    assert fake_cuda.take_launches()["_decode_kernel"] > 2 * 32
