"""A pytest plugin that runs a share of the GPU tests, the most valuable first, and records each.

``gpu_kernels.py`` starts it with these environment variables: GPU_TESTS_LOG, the file to which
records are appended, and GPU_TESTS_SHARE, such as ``2/8`` for the third of eight processes. Tests
that the log already names are not run again.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 60.0
"""Time limit of a test in seconds. A test that takes longer ends its process, because a hanging
kernel cannot be interrupted."""
_BROKEN = ("CUDA error", "Triton Error [CUDA]")
"""Parts of messages after which CUDA refuses all further work of the process."""
_LOG = Path(os.environ.get("GPU_TESTS_LOG", os.devnull))
_PLACE, _COUNT = map(int, os.environ.get("GPU_TESTS_SHARE", "0/1").split("/"))
_traceback = sys.stderr  # the log of the process, before pytest captures the output of tests
_reports: list[pytest.TestReport] = []


def rank(test: str) -> int:
    """Return a test's rank. Tests of lower rank run first; tests of equal rank keep their order.

    Tests of the worker come first, because these tests cover CUDA graphs, transfers and sampling.
    Tests of bfloat16 kernels for heads of 128 elements are next, because most models use such
    heads.
    """
    if test.startswith("tests/worker/"):
        return 0
    if "torch.float" in test:  # float32 and float16, but not torch.bfloat16
        return 3
    return 1 if "128" in test else 2


def records(log: Path) -> list[dict[str, Any]]:
    """Return the records of a file, without an incomplete last line."""
    found = []
    for line in log.read_text(errors="replace").splitlines() if log.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _record(**values: Any) -> None:
    with _LOG.open("a") as file:
        file.write(json.dumps(values) + "\n")


def pytest_configure() -> None:
    global _traceback
    _traceback = os.fdopen(os.dup(2), "w")


def pytest_unconfigure() -> None:
    _traceback.close()


@pytest.hookimpl(trylast=True)  # after pytest has dropped the tests without the marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(item.nodeid))
    mine = items[_PLACE::_COUNT]
    started = {record.get("started") for record in records(_LOG)}
    _record(collected=[item.nodeid for item in mine])
    items[:] = [item for item in mine if item.nodeid not in started]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _reports.clear()
    _record(started=item.nodeid)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=_traceback)
    try:
        result = yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    bad = [report for report in _reports if report.failed]
    skipped = any(report.skipped for report in _reports)
    error = bad[0].longreprtext if bad else ""
    _record(
        ended=item.nodeid,
        outcome="failed" if bad else "skipped" if skipped else "passed",
        seconds=round(sum(report.duration for report in _reports), 2),
        error=error[-500:],
    )
    if any(message in error for message in _BROKEN):
        item.session.shouldstop = "CUDA refuses all further work of this process"
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append(report)
