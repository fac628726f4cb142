"""Prints results of commands to stdout. This module imports little, because all commands do."""

from __future__ import annotations

import sys


def print_stdout(text: str) -> None:
    """Print a result to stdout; a closed stdout is not an error.

    Raises:
        OSError: stdout cannot be written, for example because its disk is full.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = None  # Python flushes stdout at exit, which would fail again
