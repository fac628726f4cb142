"""Writes to a terminal: lines, colors, and a line that is rewritten in place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.utils import disp_len, disp_trim

LINE_EVERY_S = 30.0
"""Seconds between progress lines if a line cannot be rewritten."""
_UNKNOWN_COLUMNS = 80
_SGR = {"good": "32", "bad": "31", "bar": "36", "dim": "2"}


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """Print a line; ignore a closed stream."""
    name = "stderr" if to_stderr else "stdout"
    stream = getattr(sys, name)
    try:
        if stream is not None and stream.isatty():
            tqdm.write(text, file=stream)  # prints above the progress line
        else:
            print(text, file=stream, flush=True)
    except (OSError, ValueError):
        setattr(sys, name, None)  # Python flushes the stream at exit, which would fail again


class TerminalLine:
    """A line of stderr that is rewritten in place and never wraps.

    The cursor stays at the start of the line, so the next text overwrites what the terminal itself
    writes there, such as the ``^C`` of Ctrl-C.
    """

    def __init__(self) -> None:
        # ``print_line`` removes ``sys.stderr`` if its terminal is closed.
        is_closed = sys.stderr is None
        self._line: Any = _Line(
            bar_format="{desc}", leave=False, dynamic_ncols=True, disable=is_closed
        )

    def show(self, text: str) -> None:
        """Replace the line's text, cut to the terminal's width."""
        self._line.set_description_str(disp_trim(text, columns()))

    def close(self, last: str = "") -> None:
        """End the line with ``last``; if ``last`` is "", the next text replaces the line."""
        self._line.close()
        if last:
            print_line(disp_trim(last, columns()), to_stderr=True)


class _Line(tqdm):  # type: ignore[misc]
    """A line of tqdm that keeps the cursor at the start."""

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        last = 0

        def print_status(text: str) -> None:
            nonlocal last
            length = disp_len(text)
            file.write(f"\r{text}{' ' * (last - length)}\r")
            file.flush()
            last = length

        return print_status


def columns() -> int:
    """Return the number of columns of stderr minus one, because some terminals wrap full lines."""
    known = 0
    with suppress(AttributeError, OSError, ValueError):
        known = os.get_terminal_size(sys.stderr.fileno()).columns
    return (known or _UNKNOWN_COLUMNS) - 1


def has_drawing_characters() -> bool:
    """Return True if stderr can show more than ASCII."""
    encoding = getattr(sys.stderr, "encoding", None) or ""
    return "utf" in encoding.lower() and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str) -> str:
    """Style ``text`` as ``good``, ``bad``, ``bar`` or ``dim``, unless NO_COLOR is set.

    See https://no-color.org.
    """
    has_color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{_SGR[style]}m{text}\x1b[0m" if has_color else text
