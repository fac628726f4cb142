"""The tests under the marker ``gpu``, dealt out to several processes: they mostly compile."""

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
_SPARE_S = 10.0  # for what is left to do when a test hangs
_OUTCOME = re.compile(r"^(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_PYTEST = (
    sys.executable, "-m", "pytest", "-m", "gpu", "-o", "filterwarnings=default",
    "-p", "no:cacheprovider",
)  # fmt: skip


def kernels(results: Results, ends: float, *, dry_run: bool) -> None:
    """Run the tests, a cell for each process; a dry run only collects them."""
    found = _collect()
    results.add("kernels", "collected", {"ok": bool(found), "tests": len(found)})
    if dry_run:
        return
    logs = results.folder / "logs"
    logs.mkdir(exist_ok=True)
    count = min(_PROCESSES, max(1, (os.cpu_count() or 1) - 2), len(found))
    running = {
        f"tests-{place}": _start(found[place::count], logs, f"tests-{place}")
        for place in range(count)
    }
    for place, (name, process) in enumerate(running.items()):
        try:
            process.wait(max(1.0, ends - _SPARE_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log = (logs / f"{name}.log").read_text(errors="replace")
        results.add("kernels", name, outcomes(found[place::count], log))


def outcomes(tests: list[str], log: str) -> dict[str, Any]:
    """What a process's log says of its tests: how many passed, which did not, and which not yet."""
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
    """Files that have tests under the marker."""
    return sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b|\b(NEEDS_CUDA|CPU_AND_CUDA|on_both)\b", path.read_text())
    )


def _collect() -> list[str]:
    done = subprocess.run(
        [*_PYTEST, "--collect-only", "-q", *test_files()],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stderr, *done.stdout.splitlines()[-20:], sep="\n")
    if done.returncode != 0:
        raise RuntimeError("pytest could not collect the tests; what it says is above")
    return [line for line in done.stdout.splitlines() if "::" in line]


def _start(tests: list[str], logs: Path, name: str) -> subprocess.Popen[bytes]:
    chosen = logs / f"{name}.txt"
    chosen.write_text("\n".join(tests) + "\n")
    with (logs / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*_PYTEST, "-v", f"@{chosen}"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
