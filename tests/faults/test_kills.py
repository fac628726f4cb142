"""Processes that are killed at the worst of times; ``make faults`` has many more of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer.job.storage.failpoints import VARIABLE
from tests.faults import quick
from tests.faults.kills import KINDS, STAGES
from tests.job.update.test_swap import STEPS


def found(scenario: Callable[[Path], object], folder: Path) -> dict[str, Any]:
    """What came of a scenario, run by a process of its own."""
    command = [sys.executable, "-m", "tests.faults.quick", scenario.__name__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.long
def test_every_commit_step_may_be_the_last(tmp_path: Path) -> None:
    by_point = found(quick.kill_at_named_points, tmp_path)
    steps = len(KINDS) * len(STAGES)
    assert by_point["points"] == 3 * steps
    assert by_point["jobs"] == steps, "each went on to the output of an unbroken run"
    assert by_point["kills"] >= steps


@pytest.mark.parametrize("scenario", [quick.kill_by_a_row, quick.kill_by_a_prompt])
def test_a_row_that_kills_the_process_is_given_up_and_no_other(
    scenario: Callable[[Path], object], tmp_path: Path
) -> None:
    """In the engine, or when it is made into a prompt."""
    by_row = found(scenario, tmp_path)
    assert by_row["code"] == 3
    assert by_row["errors"] == {str(quick.POISON): "crashed_engine"}
    assert 4 <= by_row["kills"] <= 2 + 6 + 2


@pytest.mark.long
def test_a_stop_is_exit_75_and_of_two_runs_one_wins(tmp_path: Path) -> None:
    assert found(quick.stop_and_race, tmp_path) == {"stops": 3, "races": [[0, 7], [0, 7]]}


@pytest.mark.long
def test_the_same_samples_are_accepted_after_kills(tmp_path: Path) -> None:
    accepting = found(quick.kill_while_accepting, tmp_path)
    assert accepting["jobs"] == accepting["points"] >= 4
    assert accepting["kills"] >= accepting["points"]


@pytest.mark.long
def test_long_answers_go_on_after_each_kill(tmp_path: Path) -> None:
    long = found(quick.kill_while_tokens_are_kept, tmp_path)
    assert long["jobs"] == len(STAGES)
    assert long["kills"] >= len(STAGES)
    assert long["left"] == []


@pytest.mark.long
def test_a_shard_goes_on_after_each_kill(tmp_path: Path) -> None:
    by_point = found(quick.kill_a_shard_at_named_points, tmp_path)
    assert by_point["jobs"] == by_point["points"] >= 8
    assert by_point["kills"] >= by_point["points"]


@pytest.mark.long
def test_an_update_goes_on_after_each_kill(tmp_path: Path) -> None:
    by_point = found(quick.kill_an_update, tmp_path)
    assert by_point["points"] >= 72
    assert by_point["steps"] == len(STEPS)
    assert by_point["kills"] >= len(STEPS)


@pytest.mark.long
def test_a_row_that_kills_a_shard_is_given_up_by_it(tmp_path: Path) -> None:
    by_row = found(quick.kill_by_a_row_of_a_shard, tmp_path)
    assert by_row["code"] == 0, "too many errors are for who ends the job to tell"
    assert by_row["errors"] == {str(quick.POISON): "crashed_engine"}
    assert 4 <= by_row["kills"] <= 2 + 6 + 2


def test_a_failpoint_does_nothing_unless_it_is_asked_for() -> None:
    code = "from batchinfer.job.storage.failpoints import failpoint\nfailpoint('x')\nfailpoint('x')"
    for value, expected in ((None, 0), ("x:3", 0), ("y:1", 0), ("x:2", -9)):
        environment = {VARIABLE: value} if value else {}
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
        assert done.returncode == expected
