"""Cases that kill their process or never end."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.faults.fuzz import run_cases
from tests.faults.violation import ViolationError


def bad(number: int, seed: int, folder: Path) -> str:
    if number == 1:
        os.abort()
    if number == 2:
        time.sleep(60)
    if number == 3:
        raise ViolationError("on purpose")
    return "well"


def test_a_fatal_case_is_named_and_the_other_cases_run(tmp_path: Path) -> None:
    found = run_cases(bad, 6, 1, tmp_path, jobs=1, most_s=2.0)
    assert found.words == {"well": 3}
    by_case = {violation.partition(":")[0]: violation for violation in found.violations}
    assert by_case.keys() == {"case 1", "case 2", "case 3"}
    assert "killed the process (exit code -6)" in by_case["case 1"]
    assert "took too long" in by_case["case 2"]
    assert "on purpose" in by_case["case 3"]
