"""The examples for schedulers are valid, and handle exit codes as the page documents."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.claims.shard import Shard, parse_shard
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.yaml import parse_yaml
from batchinfer.job.stats.status import Status
from tests.docs.pages import ROOT, Block, blocks

PAGE = ROOT / "docs" / "pipelines.md"
BLOCKS = list(blocks(PAGE))
HOPELESS = {
    ExitCode.USAGE,
    ExitCode.TOO_MANY_ROW_ERRORS,
    ExitCode.DATA,
    ExitCode.MODEL,
    ExitCode.DEVICE,
    ExitCode.LOCKED,
}


SLURM_ARRAY = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "0"}


def the(language: str, word: str) -> Block:
    (found,) = [b for b in BLOCKS if b.language == language and word in b.text]
    return found


SCRIPTS = [b for b in blocks(PAGE, ROOT / "docs" / "fleet.md") if b.language == "bash"]


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda b: b.name)
def test_scripts_are_valid(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(block.text)
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "python"], ids=lambda b: b.name
)
def test_pipelines_page_python_is_valid(block: Block) -> None:
    compile(block.text, block.name, "exec")


def test_pipelines_page_job_file_is_valid(tmp_path: Path) -> None:
    job = tmp_path / "daily.yaml"
    job.write_text(the("yaml", "# daily.yaml").text)
    spec = load_job(job, variables={"ds": "2026-11-20"})
    assert spec.input.paths == (str(tmp_path / "lake/prompts/dt=2026-11-20"),)


def test_every_status_key_is_documented() -> None:
    section = PAGE.read_text().partition("## Watching a job")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert re.findall(r"`(\w+)`", " ".join(cells)) == [field.name for field in fields(Status)]


def run_script(block: Block, folder: Path, codes: list[int]) -> tuple[int, list[str]]:
    """Run a script with stand-ins for its programs, which record their calls.

    Each call to ``batchinfer`` exits with the next of ``codes``. Return the script's exit code and
    the calls.
    """
    programs = folder / "bin"
    programs.mkdir()
    calls, left = folder / "calls", folder / "codes"
    calls.touch()
    left.write_text("".join(f"{code}\n" for code in codes))
    fakes = {
        "batchinfer": f'code=$(head -1 {left}); sed -i 1d {left}; exit "$code"',
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; "$@"',
        "scontrol": "true",
    }
    for name, does in fakes.items():
        program = programs / name
        program.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {calls}\n{does}\n')
        program.chmod(0o755)
    script = folder / "script.sh"
    script.write_text(block.text.replace("/var/lock/", f"{folder}/"))
    path = f"{programs}:/usr/bin:/bin"
    environment = {"PATH": path, "DS": "2026-11-20", "SLURM_JOB_ID": "7", **SLURM_ARRAY}
    environment |= {"SKYPILOT_NODE_RANK": "3", "SKYPILOT_NUM_NODES": "8"}
    done = subprocess.run(["bash", script], env=environment, check=False, capture_output=True)
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize(
    ("codes", "code", "runs"), [([75, 75, 0], 0, 3), ([3], 3, 1), ([75] * 5, 75, 5), ([0], 0, 1)]
)
def test_cron_runs_again_after_75_only(
    tmp_path: Path, codes: list[int], code: int, runs: int
) -> None:
    ended, calls = run_script(the("bash", "flock"), tmp_path, codes)
    assert (ended, len(calls)) == (code, runs)
    assert calls[0].startswith("batchinfer run /opt/jobs/daily.yaml --var ds=2")


@pytest.mark.parametrize(
    ("code", "ended", "requeued"), [(75, 0, True), (0, 0, False), (4, 4, False)]
)
def test_slurm_requeues_on_75_only(tmp_path: Path, code: int, ended: int, requeued: bool) -> None:
    (script,) = [b for b in BLOCKS if "#SBATCH" in b.text and "--array" not in b.text]
    assert "#SBATCH --signal=" in script.text
    assert "#SBATCH --requeue" in script.text
    got, calls = run_script(script, tmp_path, [code])
    assert got == ended
    assert ("scontrol requeue 7" in calls) == requeued


@pytest.mark.parametrize(
    ("code", "ended", "requeued"), [(75, 0, True), (0, 0, False), (7, 7, False)]
)
def test_slurm_array_task_runs_one_shard_and_requeues_alone(
    tmp_path: Path, code: int, ended: int, requeued: bool
) -> None:
    script = the("bash", "#SBATCH --array")
    first, last = map(int, re.findall(r"--array=(\d+)-(\d+)", script.text)[0])
    got, calls = run_script(script, tmp_path, [code])
    assert got == ended
    assert ("scontrol requeue 6_3" in calls) == requeued
    (called,) = [call for call in calls if call.startswith("batchinfer")]
    option = called.partition("--shard ")[2].split()[0]
    environment = {**SLURM_ARRAY, "SLURM_ARRAY_TASK_MAX": str(last)}
    environment["SLURM_ARRAY_TASK_COUNT"] = str(last - first + 1)
    assert parse_shard(option, environment) == Shard(3, 8)


def test_airflow_does_not_retry_permanent_errors() -> None:
    tree = ast.parse(the("python", "airflow").text)
    (codes,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NO_RETRY"
    ]
    assert codes == HOPELESS


def test_dagster_retries_temporary_errors() -> None:
    tree = ast.parse(the("python", "dagster").text)
    (codes,) = [
        ast.literal_eval(node.comparators[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)
    ]
    assert set(codes) == set(ExitCode) - HOPELESS - {ExitCode.OK}


@pytest.mark.parametrize("is_indexed", [False, True])
def test_kubernetes_pod_failure_policy_uses_exit_codes(is_indexed: bool) -> None:
    (block,) = [
        b for b in BLOCKS if "podFailurePolicy" in b.text and ("Indexed" in b.text) == is_indexed
    ]
    manifest: dict[str, Any] = parse_yaml(block.text, "job").data
    assert (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "Job")
    spec = manifest["spec"]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # required by ``podFailurePolicy``
    names = {container["name"] for container in pod["containers"]}
    actions: dict[str, set[int]] = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        assert set(rule) in ({"action", "onExitCodes"}, {"action", "onPodConditions"})
        if "onExitCodes" in rule:
            codes = rule["onExitCodes"]
            assert codes["containerName"] in names
            assert codes["operator"] == "In"
            actions[rule["action"]] = set(codes["values"])
    # A shard's new pod may find the lock of its old pod. A retry can succeed, as the lock expires.
    hopeless = HOPELESS - {ExitCode.LOCKED} if is_indexed else HOPELESS
    assert actions == {"Ignore": {ExitCode.INTERRUPTED}, "FailJob": hopeless}
    mounted = {mount["name"] for c in pod["containers"] for mount in c["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_retried_commands_do_not_start_over(block: Block) -> None:
    """With --overwrite, a shard whose exit code was lost would start the finished job over."""
    assert "--overwrite" not in block.text


def test_indexed_kubernetes_job_runs_one_shard_per_pod() -> None:
    spec: dict[str, Any] = parse_yaml(the("yaml", "Indexed").text, "job").data["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    option, value = container["args"]
    assert option == "--shard"
    shards = [
        parse_shard(value.replace("$(JOB_COMPLETION_INDEX)", str(index)), {})
        for index in range(spec["completions"])
    ]
    assert shards == [Shard(index, spec["completions"]) for index in range(spec["completions"])]


def test_skypilot_runs_one_shard_per_node(tmp_path: Path) -> None:
    task: dict[str, Any] = parse_yaml(the("yaml", "SKYPILOT").text, "task").data
    ended, calls = run_script(Block(PAGE, 0, "bash", task["run"]), tmp_path, [0])
    assert ended == 0
    assert calls[0].endswith(f"--shard 3/{task['num_nodes']}")
