"""Places at which a test can have the process die as by ``kill -9``.

``BATCHINFER_FAILPOINT=name:count`` kills it the ``count``-th time it comes to the failpoint
``name``; without the variable a failpoint does nothing.
"""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import Final

VARIABLE: Final = "BATCHINFER_FAILPOINT"
_times = count(1)


def failpoint(name: str) -> None:
    """Die here, if this is the failpoint asked for and it has come often enough."""
    wanted, _, times = os.environ.get(VARIABLE, "").rpartition(":")
    if name == wanted and next(_times) == int(times):
        os.kill(os.getpid(), signal.SIGKILL)
