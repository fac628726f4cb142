"""`make gpu` as a dry run without a GPU, and the roofline that it compares with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_kernels  # noqa: E402
import gpu_processes  # noqa: E402
from gpu_bench import warm_up  # noqa: E402
from gpu_results import Results  # noqa: E402
from gpu_workloads import Job, gpu_workload, prompts  # noqa: E402
from roofline import Ceilings, Shape, sequential_seconds  # noqa: E402

LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256, tied=False)
DEVICE = Ceilings(bytes_per_s=1e12, flop_per_s=1e14, memory_bytes=100e9)


def start(python: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, str(ROOT / "benchmarks" / "gpu.py"), *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def cells(folder: Path) -> dict[str, dict[str, Any]]:
    stored: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return stored


@pytest.mark.long
def test_dry_run_stores_results_of_each_stage(tmp_path: Path) -> None:
    """Runs what first light does not run."""
    chosen = ["attention", "parity", "linears", "peers"]
    ended, printed = [], []
    out, copies = tmp_path / "out", tmp_path / "copies"
    with start(
        sys.executable, "--dry-run", "--out", str(out), "--stages", *chosen, OUT=str(copies)
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if finished := re.match(r"tasks: \S+: stage (\w+)  ok True", line):
                ended.append(finished[1])
                assert ended[-1] in cells(out)
    assert process.returncode == 0, "".join(printed)
    assert list(dict.fromkeys(ended)) == chosen
    stored = cells(out)
    assert stored["parity"]["tokens"]["same"] == 2
    assert len(stored["attention"]) == 5
    assert "parity: tokens" in (out / "logs" / "parity.log").read_text()
    assert sorted(path.name for path in copies.iterdir()) == ["logs.tgz", "results.json"]


@pytest.mark.long
def test_killed_run_keeps_cells_of_this_and_earlier_runs(tmp_path: Path) -> None:
    Results(tmp_path).add("parity", "tokens", {"ok": True})
    chosen = ("--stages", "bench", "--workloads", "W2")
    with start(sys.executable, "--dry-run", *chosen, "--out", str(tmp_path)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("bench: tiny start"):
                break
        process.send_signal(signal.SIGTERM)
    assert process.returncode != 0
    assert cells(tmp_path)["parity"] == {"tokens": {"ok": True}}
    assert "tiny start" in cells(tmp_path)["bench"]
    assert "bench: tiny start" in (tmp_path / "logs" / "bench-tiny.log").read_text()


def test_task_is_killed_at_its_time_limit(tmp_path: Path) -> None:
    (task,) = gpu.tasks("parity", [], [])
    outcome = gpu_processes.run_task(task, tmp_path, 0.2, dry_run=True)
    assert not outcome["ok"]
    assert outcome["error"] == "killed after 0 s"


@pytest.mark.long
def test_failed_task_reports_its_error_and_logs_the_traceback(tmp_path: Path) -> None:
    task = gpu_processes.Task("attention", "attention-x", ("--model", "no such model"), 60)
    outcome = gpu_processes.run_task(task, tmp_path, 600, dry_run=True)
    assert outcome["error"] == "exit code 1: KeyError: 'no such model'"
    assert "Traceback" in (tmp_path / outcome["log"]).read_text()


def test_make_gpu_keeps_results_in_a_folder_that_the_command_names() -> None:
    """An environment variable OUT is where copies go."""
    for variables, arguments, named in (({"OUT": "x"}, [], False), ({}, ["OUT=x"], True)):
        command = subprocess.check_output(
            ["make", "-n", "gpu", *arguments], cwd=ROOT, env=os.environ | variables, text=True
        )
        assert ("--out x" in command) == named


def test_missing_gpu_is_reported() -> None:
    with start(sys.executable, "--stages", "bench") as process:
        printed, _ = process.communicate()
    assert process.returncode == 1
    assert "no CUDA device; --dry-run" in printed


def test_unknown_model_is_refused_with_a_list_of_models() -> None:
    with start(sys.executable, "--models", "Qwen3-7B") as process:
        printed, _ = process.communicate()
    assert process.returncode == 2
    assert "invalid choice: 'Qwen3-7B'" in printed
    assert "Llama-3.1-8B" in printed


def test_each_stage_takes_at_most_nine_minutes() -> None:
    assert max(gpu.STAGES.values()) <= 540
    for stage, limit in gpu.STAGES.items():
        todo = gpu.tasks(stage, list(gpu.MODELS), list(gpu.WORKLOADS))
        assert len({task.name for task in todo}) == len(todo)
        if stage != "peers":
            assert sum(task.limit_s for task in todo) <= limit


def test_tasks_after_the_deadline_are_not_run(tmp_path: Path) -> None:
    results, todo = Results(tmp_path), gpu.tasks("parity", [], [])
    gpu.run_stage("parity", todo, results, deadline=time.monotonic(), dry_run=False)
    error = {"ok": False, "error": "not run: the time is up"}
    assert cells(tmp_path)["tasks"] == {"parity": {"stage": "parity", **error}}


def test_bench_of_a_layer_major_pool_is_a_separate_task() -> None:
    (task,) = gpu.tasks("bench", ["Qwen3-0.6B"], ["W1"], layer_major=True)
    assert task.arguments[-2:] == ("W1", "--layer-major")


def test_failed_cell_stores_its_error_until_it_is_measured_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = Results(tmp_path)
    results.measure("bench", "W1", lambda: {"seconds": 1 / 0})
    assert "line" in capfd.readouterr().err
    assert cells(tmp_path) == {
        "bench": {"W1": {"ok": False, "error": "ZeroDivisionError: division by zero"}}
    }
    results.measure("bench", "W1", lambda: {"seconds": 2.0})
    assert cells(tmp_path) == {"bench": {"W1": {"seconds": 2.0}}}


def test_incomplete_line_loses_only_its_cell(tmp_path: Path) -> None:
    Results(tmp_path).add("bench", "W1", {"seconds": 1.0})
    Results(tmp_path).add("bench", "W2", {"seconds": 2.0})
    log = tmp_path / "cells.jsonl"
    log.write_bytes(log.read_bytes()[:-5])
    Results(tmp_path).add("bench", "W3", {"seconds": 3.0})
    assert set(cells(tmp_path)["bench"]) == {"W1", "W3"}


def test_files_with_gpu_tests_do_not_import_hypothesis() -> None:
    files = gpu_kernels.test_files()
    assert {"tests/kernels/test_fp8.py", "tests/worker/test_kv_cache.py"} <= set(files)
    imports_hypothesis = re.compile(r"^(import|from) hypothesis\b", re.MULTILINE)
    assert [path for path in files if imports_hypothesis.search((ROOT / path).read_text())] == []


def test_warm_up_uses_all_rows_if_they_share_prefixes() -> None:
    for name, rows in (("W1", 64), ("W2", 64), ("W3", 128)):
        warm = warm_up(gpu_workload(name))
        assert len(warm) == rows
        assert max(job.output_len for job in warm) <= 16


def test_bound_of_a_decode_step_is_the_time_to_read_the_weights() -> None:
    """Generating two tokens reads the weights of the layers and of the head twice."""
    weights = 2 * (LLAMA_8B.layer_weights + LLAMA_8B.head_weights)
    taken = sequential_seconds(LLAMA_8B, [Job(1, 0, 2)], DEVICE)
    assert taken == pytest.approx(2 * weights / 1e12, rel=1e-3)


def test_bound_of_a_long_prefill_is_its_flops() -> None:
    taken = sequential_seconds(LLAMA_8B, [Job(16000, 0, 1)], DEVICE)
    flops = 2 * LLAMA_8B.layer_weights * 16000 + LLAMA_8B.pair_flops * 16000 * 16001 / 2
    assert taken == pytest.approx(flops / 1e14, rel=0.1)
    assert taken > flops / 1e14


def test_bound_computes_a_shared_prompt_once() -> None:
    alone = sequential_seconds(LLAMA_8B, [Job(8000, 0, 1)], DEVICE)
    shared = sequential_seconds(LLAMA_8B, [Job(8000, 7900, 1)] * 4, DEVICE)
    apart = sequential_seconds(LLAMA_8B, [Job(8000, 0, 1)] * 4, DEVICE)
    assert shared < 1.2 * alone < 0.4 * apart


@pytest.mark.parametrize(
    "jobs",
    [
        lambda prompt, output: [Job(prompt, prompt, output)] * 8,
        lambda prompt, output: [Job(prompt, 0, output, samples=8)],
    ],
    ids=["rows", "samples"],
)
def test_bound_reads_tokens_that_contexts_share_once_a_step(
    jobs: Callable[[int, int], list[Job]],
) -> None:
    fast = replace(DEVICE, flop_per_s=1e18)

    def seconds_of_100_steps(prompt: int) -> float:
        few, many = (sequential_seconds(LLAMA_8B, jobs(prompt, n), fast) for n in (50, 150))
        return many - few

    difference = seconds_of_100_steps(14_000) - seconds_of_100_steps(4_000)
    read = 100 * LLAMA_8B.kv_bytes * 10_000 / fast.bytes_per_s
    assert difference == pytest.approx(read, rel=1e-3)


def test_bound_with_little_memory_makes_sequences_wait() -> None:
    jobs = [Job(100, 0, 1000)] * 64
    small = Ceilings(1e12, 1e14, memory_bytes=24e9)
    waiting = sequential_seconds(LLAMA_8B, jobs, small)
    assert waiting > 2 * sequential_seconds(LLAMA_8B, jobs, DEVICE)


def test_w1_has_the_lengths_of_nano_vllm() -> None:
    jobs = gpu_workload("W1")
    assert sum(job.prompt_len for job in jobs) == 142_827
    assert sum(job.output_len for job in jobs) == 133_966


def test_prompts_share_only_their_prefixes() -> None:
    first, second = prompts([Job(40, 32, 1), Job(50, 32, 1)], vocab=1000, seed=0)
    assert (first[:32] == second[:32]).all()
    assert (first[32:] != second[32:40]).any()
    (other,) = prompts([Job(40, 32, 1)], vocab=1000, seed=1)
    assert (other[:32] != first[:32]).any()
