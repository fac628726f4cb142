"""Moves arrays from a worker process to its parent in shared memory, without copies."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64


class SharedArrays:
    """Arrays that are stored in an anonymous file in memory. The file is freed when no process has
    it open.

    A pickled object does not contain the file. After the worker has sent the pickled object, it
    therefore calls ``send``, and the parent calls ``receive`` on its copy.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._places: dict[str, tuple[str, tuple[int, ...], int]] = {}
        """Dtype, shape and offset of each array in the file."""
        self.num_bytes = 0
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        for name, array in contiguous.items():
            self._places[name] = array.dtype.str, array.shape, self.num_bytes
            self.num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = max(self.num_bytes, _ALIGNMENT)
        self._file = _memory_file(self.num_bytes)
        self.memory = mmap.mmap(self._file, self.num_bytes)
        for name, array in contiguous.items():
            self._view(name)[...] = array

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays, which keep the memory alive."""
        return {name: self._view(name) for name in self._places}

    def send(self, connection: Connection) -> None:
        """Send the file over a Unix socket."""
        send_handle(connection, self._file, None)
        os.close(self._file)

    def receive(self, connection: Connection) -> None:
        """Receive the file of an unpickled object."""
        file = recv_handle(connection)
        try:
            self.memory = mmap.mmap(file, self.num_bytes)
        finally:
            os.close(file)

    def _view(self, name: str) -> npt.NDArray[Any]:
        dtype, shape, offset = self._places[name]
        return np.ndarray(shape, dtype, self.memory, offset)

    def __getstate__(self) -> dict[str, Any]:
        return {"_places": self._places, "num_bytes": self.num_bytes}


def _memory_file(num_bytes: int) -> int:
    """Create an anonymous file, on Linux in memory, and return its descriptor."""
    if sys.platform == "linux":
        file = os.memfd_create("pixels")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.ftruncate(file, num_bytes)
    return file
