"""Whether anything listens where a Ray cluster should, found out before it is joined."""

from __future__ import annotations

import os
import re
import socket
import time
from threading import Event

from batchinfer.errors import DeviceError

_HOST_PORT = re.compile(r"\[?(?P<host>[^\s/]+?)\]?:(?P<port>\d+)")
_ATTEMPT_S = 1.0
_POLL_S = 0.1
_HINT = "check scale.cluster, and that the cluster runs and can be reached from here"


def is_reached(cluster: str, timeout_s: float, stop: Event) -> bool:
    """Wait until something listens at a cluster's place, where that is known.

    Args:
        cluster: ``auto``: the one that RAY_ADDRESS names; else its host:port.
        timeout_s: how long it may take.
        stop: when set, it is not waited for any longer.

    Returns:
        False where it was asked to stop before.

    Raises:
        DeviceError: there is no such host, or nothing listens there in time.
    """
    until = time.monotonic() + timeout_s
    address = os.environ.get("RAY_ADDRESS", "auto") if cluster == "auto" else cluster
    found = _HOST_PORT.fullmatch(address)
    return found is None or _listens(found["host"], int(found["port"]), until, stop)


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
