"""Prompt builders that fail in a child process.

The module imports little, because the child's limits apply while it is imported.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchinfer.errors import RowError
from batchinfer.text.prompts import Prompt
from batchinfer.text.tokenizer import Tokenizer


class Builder:
    """Renders rows, and turns each into an error with the code "done"."""

    columns = ("ids",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        del tokenizer

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """Return the rows unchanged."""
        return list(rows)

    def tokenize(self, rendered: Sequence[Any]) -> list[Prompt | RowError]:
        """Return errors that show that rendering succeeded."""
        return [RowError("done", "") for _ in rendered]


class Killed(Builder):
    """Kills its process, like the system's out-of-memory killer."""

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)
        return list(rows)


class Faulty(Builder):
    """Raises an error that no builder should raise."""

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """Raise ZeroDivisionError."""
        return [1 // 0 for _ in rows]


class Waiting(Builder):
    """Waits forever, the first few times that it renders.

    Args:
        marks: a folder that gets a file each time that the builder waits.
    """

    def __init__(self, marks: Path, times: int, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._marks = marks
        self._times = times

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """Wait forever, if this happened fewer than ``times`` times."""
        at = len(list(self._marks.iterdir()))
        if at < self._times:
            (self._marks / str(at)).touch()
            signal.sigwait([signal.SIGUSR2])
        return list(rows)


class Computing(Builder):
    """Computes forever."""

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """Compute forever."""
        while True:
            pass
