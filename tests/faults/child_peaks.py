"""Peak memory of this process's descendants.

``getrusage(RUSAGE_CHILDREN)`` cannot be used, for two reasons. When a child calls exec, its peak
includes the memory of the process that started it (``setmax_mm_hiwater_rss`` in Linux's fs/exec.c).
And the value is never reset, so that one child's peak hides those of later children.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import psutil

_EVERY_S = 0.05


class ChildPeaks:
    """Measures the peak memory of child processes within a ``with`` block.

    The system keeps a process's peak only while it lives, so memory that a child takes in its last
    moment is missed.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        """Peak resident memory of the largest process."""
        self._this = psutil.Process()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ChildPeaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def look(self) -> None:
        """Measure the living child processes now."""
        peaks = (_peak_bytes(child.pid) for child in self._this.children(recursive=True))
        self.most_bytes = max(self.most_bytes, *peaks, 0)

    def _watch(self) -> None:
        while not self._left.wait(_EVERY_S):
            self.look()


def _peak_bytes(pid: int) -> int:
    """Return a process's peak memory, or 0 if it has ended."""
    with suppress(OSError):
        _, _, rest = Path(f"/proc/{pid}/status").read_text(errors="replace").partition("VmHWM:")
        if rest:
            return int(rest.split()[0]) * 1024
    return 0
