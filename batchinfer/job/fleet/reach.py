"""Whether a Ray cluster answers, found out before this process joins it.

Ray's own attempt never ends where nobody answers, and no signal ends it either: it waits in C++. It
is made in a process that can be killed, and so in vain at no cost but its seconds.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from tempfile import TemporaryFile
from threading import Event

from batchinfer.errors import DeviceError
from batchinfer.job.fleet.ray_cluster import environment, import_ray

_HOST_PORT = re.compile(r"\[?(?P<host>[^\s/]+?)\]?:(?P<port>\d+)")
_ATTEMPT_S = 1.0
_POLL_S = 0.1
_HINT = "check scale.cluster, and that the cluster runs and can be reached from here"

_JOIN = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it ends with who started it
if os.getppid() != int(sys.argv[2]):
    sys.exit("who started this has ended")
import ray
ray.init(address=sys.argv[1], configure_logging=False, log_to_driver=False)
ray.shutdown()
"""


def is_reached(cluster: str, timeout_s: float, stop: Event) -> bool:
    """Wait until a cluster answers.

    Args:
        cluster: ``auto``: the one that RAY_ADDRESS names; else its host:port.
        timeout_s: how long it may take.
        stop: when set, it is not waited for any longer.

    Returns:
        False where it was asked to stop before.

    Raises:
        UsageError: Ray is not installed.
        DeviceError: nobody answers there, or who does is no Ray cluster that lets this process in.
    """
    import_ray()
    until = time.monotonic() + timeout_s
    address = os.environ.get("RAY_ADDRESS", "auto") if cluster == "auto" else cluster
    found = _HOST_PORT.fullmatch(address)
    if found is not None and not _listens(found["host"], int(found["port"]), until, stop):
        return False
    return _joins(address, until, timeout_s, stop)


def _listens(host: str, port: int, until: float, stop: Event) -> bool:
    """Wait until something listens at a port; False where it was asked to stop before.

    Raises:
        DeviceError: there is no such host, or nothing listens there in time.
    """
    while not stop.wait(_POLL_S):
        try:
            socket.create_connection((host, port), _ATTEMPT_S).close()
        except socket.gaierror as error:
            raise DeviceError(
                f"the Ray cluster {host}:{port} cannot be reached: {error.strerror}", hint=_HINT
            ) from None
        except OSError as error:
            if time.monotonic() > until:
                raise DeviceError(
                    f"the Ray cluster {host}:{port} cannot be reached within scale.start_timeout: "
                    f"{error.strerror or error}",
                    hint=_HINT,
                ) from None
        else:
            return True
    return False


def _joins(address: str, until: float, timeout_s: float, stop: Event) -> bool:
    """Have another process join the cluster; False where it was asked to stop before.

    Raises:
        DeviceError: it cannot, or not in time.
    """
    with environment({}), TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _JOIN, address, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # Ctrl-C is for this process
        )
        try:
            while process.poll() is None and not stop.wait(_POLL_S):
                if time.monotonic() > until:
                    raise DeviceError(
                        f"the Ray cluster {address} has not answered within scale.start_timeout, "
                        f"{timeout_s:.0f} seconds",
                        hint=_HINT,
                    )
        finally:
            process.kill()
            process.wait()
        if stop.is_set():
            return False
        if process.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise DeviceError(
                f"the Ray cluster {address} cannot be used: {(lines or ['no reason given'])[-1]}",
                hint=_HINT,
            )
    return True
