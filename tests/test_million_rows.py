"""The million-row benchmark, with a few thousand rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_small_million_rows_benchmark_resumes_within_its_bounds(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "million_rows.py")
    # Kill the run after a third of the rows; later, it might end before the signal arrives.
    size = ["--rows", "12000", "--kill-at", "0.3", "--slack", "20"]
    command = [sys.executable, script, *size, "--folder", str(tmp_path / "here")]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["rows", "memory", "swap", "resume", "commits"]
    assert "12,000, 12,000 ok" in done.stdout
    runs = tmp_path / "here" / "out" / "_batchinfer" / "runs"
    assert len(list(runs.glob("*.json"))) == 2
