"""Runs the tests with the marker ``gpu`` in several processes, because compilation is slow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_pytest import LIMIT_S, records
from gpu_results import Results

ROOT = Path(__file__).resolve().parent.parent
_PROCESSES = 8
_SPARE_S = 3.0  # reserved for reading the records
_MOST_SLOW = 10
_OPTIONS = (
    "-v", "-p", "gpu_pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist",
    "-o", "filterwarnings=default", "-o", "faulthandler_timeout=0",
)  # fmt: skip
_DRY_RUN_FILES = ["tests/kernels/test_cache_ops.py"]


def kernels(results: Results, ends: float, *, brief: bool, dry_run: bool) -> None:
    """Run the tests, and add one cell. A dry run runs a few tests in the interpreter.

    Args:
        ends: value of `time.monotonic` at which this process must end.
        brief: run as many tests as time allows, the most valuable first. If false, tests that did
            not run make the cell fail.
    """
    command = [sys.executable, "-m", "pytest", *_OPTIONS]
    command += ["-m", "not gpu", *_DRY_RUN_FILES] if dry_run else ["-m", "gpu", *test_files()]
    count = 2 if dry_run else min(_PROCESSES, max(1, (os.cpu_count() or 1) - 2))
    logs = results.folder / "logs"
    logs.mkdir(exist_ok=True)
    shares = [Share(command, logs, place, count) for place in range(count)]
    results.add("kernels", "tests", run_shares(shares, ends - _SPARE_S, brief=brief))


def run_shares(shares: list[Share], ends: float, *, brief: bool) -> dict[str, Any]:
    """Run all shares at the same time until ``ends``, and return the outcomes of their tests."""
    while sum(share.goes_on() for share in shares) and time.monotonic() < ends:
        time.sleep(0.1)
    for share in shares:
        share.stop()
    outcome = outcomes([record for share in shares for record in records(share.records)])
    return outcome | {"ok": outcome["ok"] and (brief or not outcome["not_run"])}


class Share:
    """A process that runs every n-th test, and is restarted if a test ends it.

    Args:
        command: runs pytest with the plugin ``gpu_pytest``.
        place: number of this share, below ``count``.
    """

    def __init__(self, command: list[str], logs: Path, place: int, count: int) -> None:
        self.records = logs / f"tests-{place}.jsonl"
        self.records.unlink(missing_ok=True)
        self._command = command
        self._environment = os.environ | {
            "GPU_TESTS_LOG": str(self.records),
            "GPU_TESTS_SHARE": f"{place}/{count}",
        }
        self._log = (logs / f"tests-{place}.log").open("wb")
        self._num_records = 0
        self._process = self._start()

    def goes_on(self) -> bool:
        """Return True if the process runs. First restart the process if it ended before its last
        test, unless it has made no progress since its last start."""
        if self._process.poll() is None:
            return True
        found = records(self.records)
        if not outcomes(found)["not_run"] or len(found) <= self._num_records + 1:
            return False
        self._num_records = len(found)
        self._process = self._start()
        return True

    def stop(self) -> None:
        """Kill the process if it runs, and record the test that did not end."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            *_, last = [{}, *records(self.records)]
            if "started" in last:
                with self.records.open("a") as file:
                    file.write(json.dumps({"cut": last["started"]}) + "\n")
        self._log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, cwd=ROOT, env=self._environment, stdout=self._log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def outcomes(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the records ``found``: whether the tests passed, the number of tests with each
    outcome, the errors of failed tests, the names of tests that did not run, and the slowest
    tests."""
    collected = dict.fromkeys(test for record in found for test in record.get("collected", []))
    started = {record["started"] for record in found if "started" in record}
    started -= {record["cut"] for record in found if "cut" in record}
    ended = {record["ended"]: record for record in found if "ended" in record}
    by_outcome = {
        outcome: [test for test, record in ended.items() if record["outcome"] == outcome]
        for outcome in ("passed", "skipped", "failed")
    }
    failed = {test: ended[test]["error"] for test in by_outcome["failed"]}
    failed |= dict.fromkeys(
        sorted(started - ended.keys()), f"crashed, or took longer than {LIMIT_S:.0f} s"
    )
    slowest = sorted(ended, key=lambda test: -ended[test]["seconds"])[:_MOST_SLOW]
    return {
        "ok": bool(by_outcome["passed"]) and not failed,
        "tests": len(collected),
        "passed": len(by_outcome["passed"]),
        "skipped": len(by_outcome["skipped"]),
        "failed": failed,
        "not_run": [test for test in collected if test not in started],
        "slowest": {test: ended[test]["seconds"] for test in slowest},
    }


def test_files() -> list[str]:
    """Return the files with tests that have the marker."""
    return sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(
            r"pytest\.mark\.gpu\b|\b(NEEDS_CUDA|CPU_AND_CUDA|on_both\w*)", path.read_text()
        )
    )
