"""Builders that do what none should, in a child. Light: a child's limits hold while it imports."""

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
    """Makes a prompt of each row's token ids, once it has rendered them."""

    columns = ("ids",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        del tokenizer

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """Nothing to do."""
        return list(rows)

    def tokenize(self, rendered: Sequence[Any]) -> list[Prompt | RowError]:
        """An error that shows that it came so far."""
        return [RowError("done", "") for _ in rendered]


class Killed(Builder):
    """Killed as if by the system's out-of-memory killer."""

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """Die."""
        os.kill(os.getpid(), signal.SIGKILL)
        return list(rows)


class Faulty(Builder):
    """Fails where none should."""

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """Fail."""
        return [1 // 0 for _ in rows]


class Waiting(Builder):
    """Does nothing for ever, the first few times that it is to render.

    Args:
        marks: a folder that holds a file for each time.
    """

    def __init__(self, marks: Path, times: int, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._marks = marks
        self._times = times

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """Wait."""
        at = len(list(self._marks.iterdir()))
        if at < self._times:
            (self._marks / str(at)).touch()
            signal.sigwait([signal.SIGUSR2])
        return list(rows)


class Computing(Builder):
    """Computes for ever."""

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """Compute."""
        while True:
            pass
