"""Processes that are killed at the worst of times; ``make faults`` has many more of them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from batchinfer.job.storage.failpoints import VARIABLE
from tests.faults.kills import KINDS, STAGES
from tests.faults.quick import POISON


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("kills")
    command = [sys.executable, "-m", "tests.faults.quick", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_commit_step_may_be_the_last(found: list[dict[str, Any]]) -> None:
    by_point = found[0]
    steps = len(KINDS) * len(STAGES)
    assert by_point["points"] == 3 * steps
    assert by_point["jobs"] == steps, "each went on to the output of an unbroken run"
    assert by_point["kills"] >= steps


@pytest.mark.parametrize("where", [1, 2])
def test_a_row_that_kills_the_process_is_given_up_and_no_other(
    found: list[dict[str, Any]], where: int
) -> None:
    """In the engine, or when it is made into a prompt."""
    by_row = found[where]
    assert by_row["code"] == 3
    assert by_row["errors"] == {str(POISON): "crashed_engine"}
    assert 4 <= by_row["kills"] <= 2 + 6 + 2


def test_a_stop_is_exit_75_and_of_two_runs_one_wins(found: list[dict[str, Any]]) -> None:
    assert found[3] == {"stops": 3, "races": [[0, 7], [0, 7]]}


def test_the_same_samples_are_accepted_after_kills(found: list[dict[str, Any]]) -> None:
    accepting = found[4]
    assert accepting["jobs"] == accepting["points"] >= 4
    assert accepting["kills"] >= accepting["points"]


def test_a_failpoint_does_nothing_unless_it_is_asked_for() -> None:
    code = "from batchinfer.job.storage.failpoints import failpoint\nfailpoint('x')\nfailpoint('x')"
    for value, expected in ((None, 0), ("x:3", 0), ("y:1", 0), ("x:2", -9)):
        environment = {VARIABLE: value} if value else {}
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
        assert done.returncode == expected
