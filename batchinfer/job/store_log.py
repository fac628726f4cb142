"""A file that is added to, in a store that has none such."""

from __future__ import annotations

import io
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from batchinfer.errors import JobError

EVERY_S = 5.0
KEPT_BYTES = 1 << 18
"""Of the end of what was written; the rest is dropped."""


class StoreLog(io.RawIOBase):
    """Puts its content into the store as a whole: at once after a while of silence, else when the
    last time was ``EVERY_S`` ago. What cannot be put is left: a job does not end for its log.

    Args:
        put: writes the object.
        clock: seconds.
        at_once: put it with every write.
    """

    def __init__(
        self,
        put: Callable[[bytes], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        at_once: bool = False,
    ) -> None:
        self._store = put
        self._clock = clock
        self._at_once = at_once
        self._content = bytearray()
        self._changed = False
        self._put_at = -math.inf
        self._mutex = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with self._mutex:
            self._content += data
            del self._content[:-KEPT_BYTES]
            self._changed = True
            if self._at_once or self._clock() - self._put_at >= EVERY_S:
                self._put()
        return len(data)

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            with self._mutex:
                self._put()
        super().close()

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            with self._mutex:
                self._put()

    def _put(self) -> None:
        if self._changed:
            with suppress(JobError):
                self._store(bytes(self._content))
            self._changed = False
            self._put_at = self._clock()
