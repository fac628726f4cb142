"""`make gpu` without a GPU: the same code on tiny shapes, and the bound it compares with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.minimal_environment import make_environment

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_kernels  # noqa: E402
from gpu_bench import warm_up  # noqa: E402
from gpu_results import Results  # noqa: E402
from gpu_workloads import Job, gpu_workload, prompts  # noqa: E402
from roofline import Ceilings, Shape, sequential_seconds  # noqa: E402

LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256, tied=False)
DEVICE = Ceilings(bytes_per_s=1e12, flop_per_s=1e14, memory_bytes=100e9)
PACKAGES = ["torch", "transformers", "triton", "numpy", "safetensors", "tokenizers", "jinja2"]
ABSENT = ["hypothesis", "polars", "psutil", "pyarrow", "ruamel"]


def start(python: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, str(ROOT / "benchmarks" / "gpu.py"), *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def cells(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.long
def test_every_stage_runs_with_few_packages_and_leaves_results_when_it_ends(
    tmp_path: Path,
) -> None:
    """The packages that `benchmarks/README.md` names: none of those for jobs."""
    python = str(make_environment(tmp_path / "environment", [*PACKAGES, "pytest"]))
    code = f"from importlib.util import find_spec; print([n for n in {ABSENT} if find_spec(n)])"
    assert subprocess.check_output([python, "-c", code], text=True) == "[]\n"
    out, ended, printed = tmp_path / "out", [], []
    with start(python, "--dry-run", "--out", str(out)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if said := re.match(r"tasks: \S+: stage (\w+)  ok True", line):
                ended.append(said[1])
                # Whatever kills the run from here on, what this stage found is on disk.
                assert ended[-1] in cells(out)
    assert process.returncode == 0, "".join(printed)
    assert list(dict.fromkeys(ended)) == list(gpu.STAGES)
    found = cells(out)
    assert found["parity"]["tokens"]["same"] == 2
    assert set(found["bench"]) == {f"tiny {cell}" for cell in ("start", "W1", "W2", "W3")}
    assert found["kernels"]["collected"]["tests"] > 100
    assert "bench: tiny W3" in (out / "logs" / "bench-tiny.log").read_text()


@pytest.mark.long
def test_a_killed_run_leaves_its_cells_and_the_next_one_adds_to_them(tmp_path: Path) -> None:
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


def test_a_task_that_takes_too_long_is_killed_and_says_so(tmp_path: Path) -> None:
    (task,) = gpu.tasks("parity", [], [])
    outcome = gpu.run_task(task, tmp_path, 0.2, dry_run=True)
    assert not outcome["ok"]
    assert outcome["error"] == "killed after 0 s"


@pytest.mark.long
def test_a_task_that_fails_says_why_and_its_log_has_the_traceback(tmp_path: Path) -> None:
    task = gpu.Task("attention", "attention-x", ("--model", "no such model"), 60)
    outcome = gpu.run_task(task, tmp_path, 600, dry_run=True)
    assert outcome["error"] == "ended with 1: KeyError: 'no such model'"
    assert "Traceback" in (tmp_path / outcome["log"]).read_text()


def test_a_machine_without_a_gpu_is_told_so() -> None:
    with start(sys.executable, "--stages", "bench") as process:
        printed, _ = process.communicate()
    assert process.returncode == 1
    assert "no CUDA device: give --dry-run" in printed


def test_a_model_that_is_not_known_is_refused_with_those_that_are() -> None:
    with start(sys.executable, "--models", "Qwen3-7B") as process:
        printed, _ = process.communicate()
    assert process.returncode == 2
    assert "invalid choice: 'Qwen3-7B'" in printed
    assert "Llama-3.1-8B" in printed


def test_any_two_stages_fit_in_nine_minutes() -> None:
    assert all(sum(pair) <= 540 for pair in combinations(gpu.STAGES.values(), 2))
    for stage, limit in gpu.STAGES.items():
        todo = gpu.tasks(stage, list(gpu.MODELS), list(gpu.WORKLOADS))
        assert all(task.limit_s <= limit for task in todo)
        assert len({task.name for task in todo}) == len(todo)


def test_a_cell_that_fails_keeps_its_error_and_a_new_one_replaces_it(
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


def test_a_line_that_was_cut_off_costs_its_cell_alone(tmp_path: Path) -> None:
    Results(tmp_path).add("bench", "W1", {"seconds": 1.0})
    Results(tmp_path).add("bench", "W2", {"seconds": 2.0})
    log = tmp_path / "cells.jsonl"
    log.write_bytes(log.read_bytes()[:-5])
    Results(tmp_path).add("bench", "W3", {"seconds": 3.0})
    assert set(cells(tmp_path)["bench"]) == {"W1", "W3"}


def test_a_log_says_which_tests_passed_and_which_were_not_reached() -> None:
    log = (
        "tests/a.py::test_one[x y] PASSED                  [ 25%]\n"
        "tests/a.py::test_two FAILED                       [ 50%]\n"
        "tests/a.py::test_three SKIPPED (no device)        [ 75%]\n"
        "tests/a.py::test_four \n"
    )
    tests = [f"tests/a.py::test_{name}" for name in ("one[x y]", "two", "three", "four")]
    found = gpu_kernels.outcomes(tests, log)
    assert (found["passed"], found["skipped"], found["ok"]) == (1, 1, False)
    assert found["failed"] == ["tests/a.py::test_two"]
    assert found["not_run"] == ["tests/a.py::test_four"]


def test_files_with_gpu_tests_are_found_and_need_no_hypothesis() -> None:
    files = gpu_kernels.test_files()
    assert {"tests/kernels/test_fp8.py", "tests/worker/test_kv_cache.py"} <= set(files)
    of_hypothesis = re.compile(r"^(import|from) hypothesis\b", re.MULTILINE)
    assert [path for path in files if of_hypothesis.search((ROOT / path).read_text())] == []


def test_rows_that_share_prefixes_are_warmed_up_whole() -> None:
    for name, rows in (("W1", 64), ("W2", 64), ("W3", 128)):
        warm = warm_up(gpu_workload(name))
        assert len(warm) == rows
        assert max(job.output_len for job in warm) <= 16


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
