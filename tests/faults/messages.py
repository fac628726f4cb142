"""Messages of failing commands as a text file; ``python -m tests.faults.messages`` writes it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.failures import Failure, failed
from tests.faults.failures_of_runs import RUNS
from tests.faults.failures_of_usage import USAGE
from tests.models import make_text_model

GOLDEN = Path(__file__).with_name("messages.txt")


def all_failures() -> dict[str, Failure]:
    """Return all failures, keyed by expected exit code and title."""
    return {**{f"2 {title}": failure for title, failure in USAGE.items()}, **RUNS}


def as_text(title: str, code: int, printed: str) -> str:
    """Format a failure as in the file."""
    lines = "".join(f"    {line}\n" for line in printed.splitlines())
    return f"{title}: exit {code}\n{lines}"


def golden() -> dict[str, str]:
    """Return the entries of the file, keyed by title."""
    entries = GOLDEN.read_text(encoding="utf-8").split("\n\n")
    return {entry.partition(":")[0]: entry.strip("\n") + "\n" for entry in entries}


def _texts() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        model = make_text_model(Path(name) / "model")
        for title, failure in all_failures().items():
            yield as_text(title, *failed(failure, model))


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(_texts()), encoding="utf-8")
