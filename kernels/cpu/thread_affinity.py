"""Binds the threads of the OpenMP runtime to cores, using a C function."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence, Set
from itertools import count

from batchinfer.kernels.cpu.compiled_library import INT32, INT64, load

_VERSIONS = count(1)


class TeamCores:
    """The cores that each thread of a team may run on.

    Args:
        cores: core numbers for each thread. The first thread is the caller of ``bind``. The caller
            must unbind itself afterwards, because threads that it starts inherit its cores.
    """

    def __init__(self, cores: Sequence[Set[int]]) -> None:
        self._count = len(cores)
        self._bytes = 8 * (max(map(max, cores)) // 64 + 1)  # the kernel reads whole words
        numbers = (sum(1 << core for core in of_thread) for of_thread in cores)
        self._masks = b"".join(number.to_bytes(self._bytes, "little") for number in numbers)
        self._version = next(_VERSIONS)

    def bind(self) -> None:
        """Bind this thread, and the threads of its next parallel regions unless they are already
        bound.

        Binding takes a few microseconds. Without a C compiler, or on systems other than Linux,
        ``bind`` does nothing.
        """
        library = load()
        if library is None:
            return
        library.bind_team.argtypes = (ctypes.c_char_p, INT64, INT32, INT32)
        library.bind_team(self._masks, self._bytes, self._count, self._version)
