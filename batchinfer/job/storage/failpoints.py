"""Failpoints: places where a test can kill the process as ``kill -9`` does.

``BATCHINFER_FAILPOINT=name:count`` kills the process the ``count``-th time that it reaches the
failpoint ``name``. Without the variable a failpoint does nothing.
"""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import Final

VARIABLE: Final = "BATCHINFER_FAILPOINT"
_times = count(1)


def failpoint(name: str) -> None:
    """Kill this process if the environment variable names this failpoint and count."""
    chosen, _, times = os.environ.get(VARIABLE, "").rpartition(":")
    if name == chosen and next(_times) == int(times):
        os.kill(os.getpid(), signal.SIGKILL)
