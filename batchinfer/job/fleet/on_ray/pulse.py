"""Whether a process computes, seen from beside it: one that tells nothing may be busy or frozen."""

from __future__ import annotations

import os
import time
from pathlib import Path

_WATCHED_S = 0.5
_BUSY_SHARE = 0.1
"""Of a core's time; threads that only wait for messages take a hundredth."""


def computes(pid: int) -> bool:
    """Whether a process on this machine uses a core; False where there is none."""
    before, began = _cpu_seconds(pid), time.monotonic()
    time.sleep(_WATCHED_S)
    used = _cpu_seconds(pid) - before
    return used > _BUSY_SHARE * (time.monotonic() - began)


def _cpu_seconds(pid: int) -> float:
    """Time that all threads of a process have run; ``utime`` and ``stime`` of proc_pid_stat(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0.0
    fields = stat.rpartition(b")")[2].split()  # what is in parentheses may have spaces
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
