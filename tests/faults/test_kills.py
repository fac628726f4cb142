"""Runs that are killed at failpoints; ``make faults`` kills many more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchinfer.job.storage.failpoints import VARIABLE
from tests.faults.kill_scenarios import POISON
from tests.faults.kills import COMMITTED, STAGES
from tests.job.update.test_swap import STEPS


def results(scenario: str, folder: Path) -> dict[str, Any]:
    """Run a scenario in a new process."""
    command = [sys.executable, "-m", "tests.faults.kill_scenarios", scenario, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout)
    return values


@pytest.mark.long
@pytest.mark.parametrize(
    ("scenario", "num_points"),
    [("kill_a_run", 24), ("kill_a_shard", 8), ("kill_an_update", 12), ("kill_while_accepting", 4)],
)
def test_job_killed_at_failpoints_ends_with_the_unbroken_output(
    scenario: str, num_points: int, tmp_path: Path
) -> None:
    found = results(scenario, tmp_path)
    assert found["jobs"] == found["points"] >= num_points
    assert found["kills"] >= found["points"]
    assert {f"{folder}-{stage}" for folder in COMMITTED for stage in STAGES} <= {*found["names"]}
    if scenario == "kill_an_update":
        assert sum(name.startswith("swap-") for name in found["names"]) == len(STEPS)


@pytest.mark.long
def test_long_answers_resume_after_kills_and_leave_no_token_files(tmp_path: Path) -> None:
    found = results("kill_while_tokens_are_kept", tmp_path)
    assert found["jobs"] == len(STAGES)
    assert found["remaining"] == []


@pytest.mark.parametrize(
    ("scenario", "code"),
    [
        ("kill_by_a_row", 3),
        pytest.param("kill_by_a_prompt", 3, marks=pytest.mark.long),
        # Too many failed rows make the run that ends the job fail, not the run of a shard.
        pytest.param("kill_a_shard_by_a_row", 0, marks=pytest.mark.long),
    ],
)
def test_row_that_kills_the_process_becomes_the_only_crashed_row(
    scenario: str, code: int, tmp_path: Path
) -> None:
    found = results(scenario, tmp_path)
    assert found["code"] == code
    assert found["errors"] == {str(POISON): "crashed_engine"}
    assert 4 <= found["kills"] <= 2 + 6 + 2


@pytest.mark.long
def test_sigterm_ends_with_exit_75_and_one_of_two_runs_is_refused(tmp_path: Path) -> None:
    assert results("stop_and_race", tmp_path) == {"stops": 3, "races": [[0, 7], [0, 7]]}


def test_failpoint_kills_only_at_the_named_time() -> None:
    code = "from batchinfer.job.storage.failpoints import failpoint\nfailpoint('x')\nfailpoint('x')"
    for value, expected in ((None, 0), ("x:3", 0), ("y:1", 0), ("x:2", -9)):
        environment = {VARIABLE: value} if value else {}
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
        assert done.returncode == expected
