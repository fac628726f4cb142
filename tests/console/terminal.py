"""A pseudo-terminal; tests read its output as a screen would show it."""

from __future__ import annotations

import os
import re
import sys
import termios
from threading import Thread
from types import TracebackType
from typing import Self

import pytest

_CODE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\r\n|\r|\n|[^\x1b\r\n]+")


class PseudoTerminal:
    """Replaces ``sys.stderr`` or other streams within a ``with`` block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        controller, self.terminal = os.openpty()
        termios.tcsetwinsize(self.terminal, (24, 100))
        self._controller = controller
        self._written = bytearray()
        self._file = os.fdopen(self.terminal, "w", encoding="utf-8")
        monkeypatch.setenv("TERM", "xterm-256color")
        for name in names or ("stderr",):
            monkeypatch.setattr(sys, name, self._file)
        self._thread = Thread(target=self._read)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._thread.join()
        os.close(self._controller)

    @property
    def text(self) -> str:
        """Everything written to the terminal; available after the ``with`` block."""
        return self._written.decode()

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._controller, 65536)
            except OSError:  # no process writes to the terminal any more
                return


def screen(text: str) -> list[str]:
    """Return the lines, except empty ones, that a terminal shows after this text is written."""
    lines, row, column = [""], 0, 0
    for match in _CODE.finditer(text):
        found = match.group()
        if found == "\r":
            column = 0
        elif found in ("\n", "\r\n"):
            row, column = row + 1, 0 if found == "\r\n" else column
            lines += [""] * (row + 1 - len(lines))
        elif match.group(2) == "A":
            row = max(0, row - int(match.group(1) or 1))
        elif match.group(2) == "K":
            lines[row] = lines[row][:column] if match.group(1) in ("", "0") else ""
        elif match.group(2) is None:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + found + line[column + len(found) :]
            column += len(found)
    return [line.rstrip() for line in lines if line.strip()]
