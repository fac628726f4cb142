"""`make gpu` without a GPU: the same code on tiny shapes, and the bound it compares with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_workloads import Job, gpu_workload, prompts  # noqa: E402
from roofline import Ceilings, Shape, sequential_seconds  # noqa: E402

LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256, tied=False)
DEVICE = Ceilings(bytes_per_s=1e12, flop_per_s=1e14, memory_bytes=100e9)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )


def test_a_dry_run_goes_through_every_stage_and_leaves_no_results() -> None:
    results = ROOT / "benchmarks" / "results"
    before = sorted(results.iterdir())
    done = run("--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in ("kernels", "parity", "attention", "bench", "peers"):
        assert f"== {stage}" in done.stdout
    assert "check tokens rows 2 same 2 ok True" in done.stdout
    for workload in ("W1", "W2", "W3"):
        assert f"tiny          {workload}" in done.stdout
    assert sorted(results.iterdir()) == before


def test_a_machine_without_a_gpu_is_told_so() -> None:
    done = run("--stages", "bench")
    assert done.returncode == 1
    assert "no CUDA device: give --dry-run" in done.stderr


def test_the_bound_of_one_decode_step_is_its_bytes() -> None:
    """One token, then another: weights twice, the head twice, and little else."""
    weights = 2 * (LLAMA_8B.layer_weights + LLAMA_8B.head_weights)
    taken = sequential_seconds(LLAMA_8B, [Job(1, 0, 2)], DEVICE)
    assert taken == pytest.approx(2 * weights / 1e12, rel=1e-3)


def test_the_bound_of_a_long_prefill_is_its_products() -> None:
    taken = sequential_seconds(LLAMA_8B, [Job(16000, 0, 1)], DEVICE)
    products = 2 * LLAMA_8B.layer_weights * 16000 + LLAMA_8B.pair_flops * 16000 * 16001 / 2
    assert taken == pytest.approx(products / 1e14, rel=0.1)
    assert taken > products / 1e14


def test_a_shared_prompt_is_computed_once() -> None:
    alone = sequential_seconds(LLAMA_8B, [Job(8000, 0, 1)], DEVICE)
    shared = sequential_seconds(LLAMA_8B, [Job(8000, 7900, 1)] * 4, DEVICE)
    apart = sequential_seconds(LLAMA_8B, [Job(8000, 0, 1)] * 4, DEVICE)
    assert shared < 1.2 * alone < 0.4 * apart


def test_little_memory_makes_sequences_wait() -> None:
    jobs = [Job(100, 0, 1000)] * 64
    small = Ceilings(1e12, 1e14, memory_bytes=24e9)
    waiting = sequential_seconds(LLAMA_8B, jobs, small)
    assert waiting > 2 * sequential_seconds(LLAMA_8B, jobs, DEVICE)


def test_w1_has_the_lengths_it_is_known_for() -> None:
    jobs = gpu_workload("W1")
    assert sum(job.prompt_len for job in jobs) == 142_827
    assert sum(job.output_len for job in jobs) == 133_966


def test_prompts_share_what_their_jobs_say_and_no_more() -> None:
    first, second = prompts([Job(40, 32, 1), Job(50, 32, 1)], vocab=1000, seed=0)
    assert (first[:32] == second[:32]).all()
    assert (first[32:] != second[32:40]).any()
    (other,) = prompts([Job(40, 32, 1)], vocab=1000, seed=1)
    assert (other[:32] != first[:32]).any()
