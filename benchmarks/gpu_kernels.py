"""Runs the tests with the marker ``gpu`` in several processes, because compilation is slow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_results import Results

ROOT = Path(__file__).resolve().parent.parent
_PROCESSES = 8
_SPARE_S = 10.0  # reserved for reading logs if a test hangs
_OUTCOME = re.compile(r"^(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_PYTEST = (
    sys.executable, "-m", "pytest", "-m", "gpu", "-o", "filterwarnings=default",
    "-p", "no:cacheprovider",
)  # fmt: skip


def kernels(results: Results, ends: float, *, dry_run: bool) -> None:
    """Run the tests, and add one cell per process; a dry run only collects the tests."""
    tests = _collect()
    results.add("kernels", "collected", {"ok": bool(tests), "tests": len(tests)})
    if dry_run:
        return
    logs = results.folder / "logs"
    logs.mkdir(exist_ok=True)
    count = min(_PROCESSES, max(1, (os.cpu_count() or 1) - 2), len(tests))
    running = {
        f"tests-{place}": _start(tests[place::count], logs, f"tests-{place}")
        for place in range(count)
    }
    for place, (name, process) in enumerate(running.items()):
        try:
            process.wait(max(1.0, ends - _SPARE_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log = (logs / f"{name}.log").read_text(errors="replace")
        results.add("kernels", name, outcomes(tests[place::count], log))


def outcomes(tests: list[str], log: str) -> dict[str, Any]:
    """Parse a log: return numbers of tests, and the names of failed tests and of missing ones."""
    seen = dict(_OUTCOME.findall(log))
    passed = [test for test in tests if seen.get(test) == "PASSED"]
    failed = [test for test in tests if seen.get(test) in ("FAILED", "ERROR")]
    missing = [test for test in tests if test not in seen]
    return {
        "ok": bool(passed) and not failed and not missing,
        "passed": len(passed),
        "skipped": sum(seen.get(test) == "SKIPPED" for test in tests),
        "failed": failed,
        "not_run": missing,
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


def _collect() -> list[str]:
    done = subprocess.run(
        [*_PYTEST, "--collect-only", "-q", *test_files()],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stderr, *done.stdout.splitlines()[-20:], sep="\n")
    if done.returncode != 0:
        raise RuntimeError("pytest could not collect the tests; its output is above")
    return [line for line in done.stdout.splitlines() if "::" in line]


def _start(tests: list[str], logs: Path, name: str) -> subprocess.Popen[bytes]:
    chosen = logs / f"{name}.txt"
    chosen.write_text("\n".join(tests) + "\n")
    with (logs / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*_PYTEST, "-v", f"@{chosen}"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
