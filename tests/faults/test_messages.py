"""Every error message says where the problem is and what to do, and changes only on purpose.

After an intended change, ``python -m tests.faults.messages`` writes the new messages.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.cli.program import MAX_MESSAGE_LINES
from tests.faults.failures import failed
from tests.faults.messages import all_failures, as_text, golden

MAX_LINE = 400
FAILURES = all_failures()


@pytest.mark.parametrize("title", FAILURES)
def test_messages_of_failures_equal_the_stored_ones(title: str, model: Path) -> None:
    code, printed = failed(FAILURES[title], model)
    assert as_text(title, code, printed) == golden()[title]
    assert code == int(title[0])
    lines = printed.splitlines()
    assert 1 <= len(lines) <= MAX_MESSAGE_LINES
    assert max(map(len, lines)) <= MAX_LINE
    assert "Traceback" not in printed


def test_there_are_enough_of_each_kind() -> None:
    assert golden().keys() == FAILURES.keys()
    assert len(FAILURES) >= 40
    assert {title[0] for title in FAILURES} == set("2345678")
