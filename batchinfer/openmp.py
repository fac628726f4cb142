"""How long idle OpenMP threads spin; read by libgomp when it is loaded, with torch."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = "10000"
"""Turns of libgomp's loop before a thread that waits goes to sleep.

libgomp's default is 300,000, milliseconds in which a thread that others wait for may lack a core:
beside other processes fewer turns are better. But 1,000, which libgomp itself takes where more
threads run than there are cores, cost a tenth of the speed alone, measured; 4,000 to 300,000 could
not be told apart there.
"""
_TOLD_BY = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def bound_spinning() -> None:
    """Have the OpenMP threads of this process, and of those it starts, sleep after a short wait.

    Does nothing where the environment says how they wait, or where torch is loaded already.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _TOLD_BY):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
